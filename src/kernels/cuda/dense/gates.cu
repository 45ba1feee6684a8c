// silu_mul and sigmoid_gate.
//
// Computes:  out = silu(gate) * up; out[t] *= sigmoid(x[t] . weight).
// Shapes:    gate_up [T, 2 I], out [T, I] bf16 or f32; x and out [T, H].
// Bytes:     T I (8 + 2 or 4); 12 T H.
// Bound:     HBM; at T = 1, the launch.
// Numerics:  f32 with expf; a dot product is summed per thread, then by halves of a warp, then over the warps
//            in order.
#include "kernels/cuda/dense_kernels.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_mma.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/cuda/ptx/row_gate.cuh"

namespace fp4moe::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) silu_mul_kernel(const __grid_constant__ SiluMulArgs a) {
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const int64_t cols = a.out.cols, t = blockIdx.x;
  const int64_t i = blockIdx.y * int64_t{kThreads} + threadIdx.x;
  if (i >= cols) return;
  const float gate = __ldcg(a.gate_up + 2 * t * cols + i), up = __ldcg(a.gate_up + (2 * t + 1) * cols + i);
  const float y = gate / (1 + expf(-gate)) * up;
  if (a.out.dtype == DType::kF32)
    static_cast<float*>(a.out.data)[t * cols + i] = y;
  else
    static_cast<bf16*>(a.out.data)[t * cols + i].bits = __bfloat16_as_ushort(__float2bfloat16_rn(y));
}

__global__ void __launch_bounds__(kGateThreads)
    sigmoid_gate_kernel(const __grid_constant__ SigmoidGateArgs a) {
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  float* out = a.out + blockIdx.x * a.hidden_size;
  const float gate = row_gate(a.x + blockIdx.x * a.hidden_size, a.weight, a.hidden_size);
  for (int64_t i = threadIdx.x; i < a.hidden_size; i += kGateThreads) out[i] = __ldcg(out + i) * gate;
}

}  // namespace

void silu_mul(const SiluMulArgs& args, ThreadPool&) {
  launch(
      "silu_mul", silu_mul_kernel,
      {dim3(static_cast<unsigned>(args.out.rows), static_cast<unsigned>(ceil_div(args.out.cols, kThreads))),
       dim3(kThreads)},
      args);
}

void sigmoid_gate(const SigmoidGateArgs& args, ThreadPool&) {
  launch("sigmoid_gate", sigmoid_gate_kernel,
         {dim3(static_cast<unsigned>(args.num_tokens)), dim3(kGateThreads)}, args);
}

}  // namespace fp4moe::cuda
