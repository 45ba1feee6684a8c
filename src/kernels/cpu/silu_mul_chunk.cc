// Computes  out = gate * sigmoid(gate) * up for some columns of one row; x *= sigmoid(gate) for some rows.
// Bytes     8 (or 6, for bf16 x) read, 2 or 4 written per element; bound by the L2 cache or by memory.
// Numerics  f32; exp within 2.5e-7, four more roundings, then the rounding to out's type.
#include "kernels/cpu/dense_chunks.h"
#include "kernels/cpu/vec.h"

namespace fp4moe::FP4MOE_ISA {

void silu_mul_chunk(const SiluMulArgs& a, int64_t row, int64_t col_begin, int64_t col_end) {
  const float* gates = a.gate_up + 2 * row * a.out.cols;
  const float* ups = gates + a.out.cols;
  for (int64_t i = col_begin; i < col_end; i += kLanes) {
    const int64_t n = col_end - i, out = row * a.out.cols + i;
    const Vec gate = load_partial(gates + i, n);
    const Vec y = mul(times_sigmoid(gate, gate), load_partial(ups + i, n));
    if (a.out.dtype == DType::kF32)
      store_partial(static_cast<float*>(a.out.data) + out, y, n);
    else
      store_partial(static_cast<bf16*>(a.out.data) + out, y, n);
  }
}

void mul_sigmoid_chunk(const MulSigmoidArgs& a, int64_t row_begin, int64_t row_end) {
  for (int64_t i = row_begin * a.num_heads; i < row_end * a.num_heads; ++i) {
    const int64_t t = i / a.num_heads, head = i % a.num_heads, at = t * a.x.cols + head * a.head_dim;
    const float* gate = a.gate + t * a.gate_stride + head * a.gate_head_stride;
    for (int d = 0; d < a.head_dim; d += kLanes) {
      const int n = a.head_dim - d;
      if (a.x.dtype == DType::kF32) {
        float* x = static_cast<float*>(a.x.data) + at + d;
        store_partial(x, times_sigmoid(load_partial(x, n), load_partial(gate + d, n)), n);
      } else {
        bf16* x = static_cast<bf16*>(a.x.data) + at + d;
        store_partial(x, times_sigmoid(load_partial(x, n), load_partial(gate + d, n)), n);
      }
    }
  }
}

}  // namespace fp4moe::FP4MOE_ISA
