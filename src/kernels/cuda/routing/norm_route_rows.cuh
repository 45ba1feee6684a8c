// The arguments of norm_route.cu's kernels, and the rows that they read. Device code only.
#pragma once

#include "kernels/cuda/comm/fused_sums.cuh"
#include "kernels/cuda/routing/router_choice.cuh"

namespace fp4moe::norm_routing {

constexpr int kParts = 8;  // of a row: a warp has one
constexpr int kThreads = kParts * 32;
constexpr int kVector = 8;  // columns that a lane reads at once

struct NormRouteArgs {
  const float *x, *norm_weight;
  bf16* out_act;
  float* out_f32;
  const bf16* weight;
  const float* bias;  // or null
  RoutingRule rule;
  float* logits;
  Choices out;
  float eps, inverse_hidden;  // inverse_hidden: 1 / hidden_size
  int hidden_size, num_experts;
  RouterWord* words;  // [T, E], for few tokens: logits on their way
};

// The vectors [begin, end) of a row that a warp processes.
struct Part {
  int begin, end;
  __host__ __device__ Part(int num_vectors, int part)
      : begin(num_vectors * part / kParts), end(num_vectors * (part + 1) / kParts) {}
};
constexpr int max_part(int num_vectors) { return (num_vectors + kParts - 1) / kParts; }

// A lane's columns: vectors lane, lane + 32, ... of its warp's part.
template <int kCount>
struct Columns {
  float values[kCount][kVector] = {};

  __device__ void load(const float* row, const Part& part) {
    each(part, [&](int i, int v) {
      const float4* from = reinterpret_cast<const float4*>(row + v * kVector);
      const float4 a = __ldcg(from), b = __ldcg(from + 1);
      float* x = values[i];
      x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    });
  }
  template <class Function>
  static __device__ void each(const Part& part, Function function) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (const int v = part.begin + i * 32 + static_cast<int>(threadIdx.x) % 32; v < part.end)
        function(i, v);
  }
};

// x for a block that multiplies: the rows of NormRouteArgs::x, or their sums with those of a group's ranks.
struct PlainRows {
  // Waits until the inputs of a block that reads no rows are there.
  static __device__ __forceinline__ void await_inputs() { ptx::grid_dependency_wait(); }
  template <int kVectors>
  static __device__ __forceinline__ void put_aside(const Columns<kVectors>&, void*) {}
  template <int kVectors>
  static __device__ __forceinline__ void bring_back(const void*, Columns<kVectors>&) {}
  // Waits for the preceding kernels.
  __device__ __forceinline__ PlainRows() { ptx::grid_dependency_wait(); }
  template <int kVectors>
  __device__ __forceinline__ void load(const NormRouteArgs& a, int64_t t, const Part& part,
                                       Columns<kVectors>& x) {
    x.load(a.x + t * a.hidden_size, part);
  }
  __device__ __forceinline__ void enter() {}
  __device__ __forceinline__ void leave() const {}
};

class TakenRows {
 public:
  static __device__ __forceinline__ void await_inputs(const SumsToTake& sums) {
    cuda::SumTaker::await_sender(sums);
  }
  __device__ __forceinline__ explicit TakenRows(const SumsToTake& sums)
      : taker_(sums, taking_thread()), out_(sums.out) {}

  // load() needs the registers of the norm's weights, which are meanwhile in shared memory: `aside` has
  // aside_bytes().
  static constexpr int aside_bytes(int vectors) { return vectors * kThreads * kVector * 4; }
  template <int kVectors>
  static __device__ __forceinline__ void put_aside(const Columns<kVectors>& weight, void* aside) {
    float4* const to = static_cast<float4*>(aside) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float* v = weight.values[i];
      to[2 * i * kThreads] = {v[0], v[1], v[2], v[3]};
      to[(2 * i + 1) * kThreads] = {v[4], v[5], v[6], v[7]};
    }
  }
  template <int kVectors>
  static __device__ __forceinline__ void bring_back(const void* aside, Columns<kVectors>& weight) {
    const float4* const from = static_cast<const float4*>(aside) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float* v = weight.values[i];
      const float4 low = from[2 * i * kThreads], high = from[(2 * i + 1) * kThreads];
      v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
      v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    }
  }

  // Also stores the block's share of the columns of x.
  template <int kVectors>
  __device__ __forceinline__ void load(const NormRouteArgs& a, int64_t t, const Part& part,
                                       Columns<kVectors>& x) {
    const int workers = static_cast<int>(gridDim.x) - 1, worker = static_cast<int>(blockIdx.x) - 1;
    x.load(a.x + t * a.hidden_size, part);
    constexpr int kAtOnce = kVectors < 2 ? kVectors : 2;
    const int first = static_cast<int>(t) * (a.hidden_size / 4);
#pragma unroll
    for (int i0 = 0; i0 < kVectors; i0 += kAtOnce)
      taker_.template take<2 * kAtOnce>(
          [&](int j) {
            const int v = part.begin + (i0 + j / 2) * 32 + static_cast<int>(threadIdx.x) % 32;
            return v < part.end ? first + 2 * v + j % 2 : -1;
          },
          [&](int j, const float4& sum) {
            float* const to = x.values[i0 + j / 2] + j % 2 * 4;
            to[0] += sum.x, to[1] += sum.y, to[2] += sum.z, to[3] += sum.w;
          });
    Columns<kVectors>::each(part, [&](int i, int v) {
      if (v % workers != worker) return;
      float4* const to = reinterpret_cast<float4*>(out_ + t * a.hidden_size + v * kVector);
      const float* from = x.values[i];
      to[0] = {from[0], from[1], from[2], from[3]};
      to[1] = {from[4], from[5], from[6], from[7]};
    });
  }
  __device__ __forceinline__ void enter() { taker_.enter(); }
  __device__ __forceinline__ void leave() const { taker_.leave((gridDim.x - 1) * gridDim.y); }

 private:
  static __device__ __forceinline__ cuda::TakingThread taking_thread() {
    const uint32_t workers = gridDim.x - 1, block = blockIdx.y * workers + blockIdx.x - 1;
    return {static_cast<int>(block * kThreads + threadIdx.x),
            static_cast<int>(gridDim.y * workers * kThreads)};
  }

  cuda::SumTaker taker_;
  float* out_;
};

}  // namespace fp4moe::norm_routing
