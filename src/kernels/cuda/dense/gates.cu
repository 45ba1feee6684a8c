// silu_mul, sigmoid_gate and mul_sigmoid.
//
// Computes:  out = silu(gate) * up; out[t] *= sigmoid(x[t] . weight); x *= sigmoid(gate).
// Shapes:    gate_up [T, 2 I], out [T, I] bf16 or f32; x and out [T, H]; x and gate [T, heads, head_dim].
// Bytes:     T I (8 + 2 or 4); 12 T H; T heads head_dim (4 + 4 or 8).
// Bound:     HBM; at T = 1, the launch.
// Numerics:  f32 with expf; a dot product is summed per thread, then by halves of a warp, then over the warps
//            in order.
#include "kernels/cuda/dense_kernels.h"
#include "kernels/cuda/ptx/block_norm.cuh"
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

// Loads and stores of kCount consecutive elements, 1 or 4, as f32.
template <int kCount>
struct Elements {
  float v[kCount];

  static __device__ __forceinline__ Elements load(const float* p) {
    if constexpr (kCount == 1) {
      return {{__ldcg(p)}};
    } else {
      const float4 v = __ldcg(reinterpret_cast<const float4*>(p));
      return {{v.x, v.y, v.z, v.w}};
    }
  }
  static __device__ __forceinline__ Elements load(const bf16* p) {
    if constexpr (kCount == 1) {
      const uint32_t bits = __ldcg(reinterpret_cast<const unsigned short*>(p));
      return {{__uint_as_float(bits << 16)}};
    } else {
      const uint2 v = __ldcg(reinterpret_cast<const uint2*>(p));
      return {{__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000), __uint_as_float(v.y << 16),
               __uint_as_float(v.y & 0xffff0000)}};
    }
  }
  __device__ __forceinline__ void store(float* p) const {
    if constexpr (kCount == 1)
      *p = v[0];
    else
      *reinterpret_cast<float4*>(p) = {v[0], v[1], v[2], v[3]};
  }
  __device__ __forceinline__ void store(bf16* p) const {
    if constexpr (kCount == 1)
      p->bits = __bfloat16_as_ushort(__float2bfloat16_rn(v[0]));
    else
      *reinterpret_cast<uint2*>(p) = bf16_words({v[0], v[1], v[2], v[3]});
  }
};

// A thread has kCount columns of one head. T: x's type.
template <class T, int kCount>
__global__ void __launch_bounds__(kThreads) mul_sigmoid_kernel(const __grid_constant__ MulSigmoidArgs a) {
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const int i = static_cast<int>(blockIdx.y * kThreads + threadIdx.x) * kCount;
  if (i >= a.x.cols) return;
  const int64_t t = blockIdx.x, head = i / a.head_dim;
  const auto gate =
      Elements<kCount>::load(a.gate + t * a.gate_stride + head * a.gate_head_stride + i % a.head_dim);
  T* const at = static_cast<T*>(a.x.data) + t * a.x.cols + i;
  auto x = Elements<kCount>::load(at);
#pragma unroll
  for (int j = 0; j < kCount; ++j) x.v[j] *= 1 / (1 + expf(-gate.v[j]));
  x.store(at);
}

template <int kCount>
void launch_mul_sigmoid(const MulSigmoidArgs& args) {
  const bool is_f32 = args.x.dtype == DType::kF32;
  launch("mul_sigmoid", is_f32 ? mul_sigmoid_kernel<float, kCount> : mul_sigmoid_kernel<bf16, kCount>,
         {dim3(static_cast<unsigned>(args.x.rows),
               static_cast<unsigned>(ceil_div(args.x.cols, kThreads * kCount))),
          dim3(kThreads)},
         args);
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

void mul_sigmoid(const MulSigmoidArgs& args, ThreadPool&) {
  const bool in_fours = args.head_dim % 4 == 0 && args.gate_stride % 4 == 0 &&
                        args.gate_head_stride % 4 == 0 && is_aligned_to_16(args.gate) &&
                        is_aligned_to_16(args.x.data);
  in_fours ? launch_mul_sigmoid<4>(args) : launch_mul_sigmoid<1>(args);
}

}  // namespace fp4moe::cuda
