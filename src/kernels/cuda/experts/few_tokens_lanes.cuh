// few_tokens.cu's tokens and sums in a direct round (kernels/device_a2a.h): the tokens are the round's lanes,
// whose words arrive while the kernel runs, and the sums go to the tokens' ranks. Device code only.
#pragma once

#include "kernels/cuda/comm/a2a_direct.cuh"
#include "kernels/cuda/experts/few_tokens_finish.cuh"

namespace fp4moe::few {

struct LaneArgs : Args {
  A2aRound round;
};

// A wait ends if the group fails; what is computed then is not used.
struct LaneInput {
  cuda::DirectRound round;
  cuda::Operation operation;

  __device__ explicit LaneInput(const LaneArgs& a)
      : round(a.round), operation(a.round.group, a.round.op, cuda::Entered{}) {}

  // The helper warp waits for the words and leaves them in shared memory: if all warps of all CTAs polled the
  // same words, each poll would take several times as long.
  __device__ Slots slots(const Args& a, Shared& s, bool is_helper) const {
    auto* const words = reinterpret_cast<uint2*>(s.pieces);  // not used before the first phase
    const int lane = static_cast<int>(threadIdx.x) % 32,
              count = static_cast<int>(a.moe.num_tokens * a.moe.topk);
    if (is_helper)
      for (int at = lane; at < count; at += 32) words[at] = arrived_slot(at);
    __syncthreads();
    Slots slots;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = lane + 32 * i;
      const uint2 word = at < count ? words[at] : uint2{};
      slots.id[i] = static_cast<int32_t>(word.x);
      slots.weight[i] = __uint_as_float(word.y);
      slots.is_shared[i] = false;
    }
    return slots;
  }
  __device__ uint4 piece(const Args&, int t, int col) const { return cuda::load_words(address(t, col)); }
  __device__ void await(const Args&, int t, int col, uint4& words) const {
    if (cuda::has_arrived(words)) return;
    operation.wait(source_of(t), [&](uint32_t&) {
      words = cuda::load_words(address(t, col));
      return cuda::has_arrived(words);
    });
  }
  __device__ bool goes_on(uint32_t& polls) const {
    if (++polls % 64 != 0) return true;
    return *const_cast<const volatile uint32_t*>(&cuda::state_of(round.a.group, me())->poison) == 0;
  }

  // Marks this CTA's share of the last round's lanes as unsent. Called by the helper warp, before it tells
  // the other CTAs that it has cleared its words.
  __device__ void clear_last_lanes() const {
    const uint32_t last = 1 - round.buffer();
    const int64_t lanes = kDirectLanes, k = round.a.shape.top_k;
    mark(round.row(me(), 0, last), lanes * round.a.shape.hidden_size * int64_t{sizeof(bf16)});
    mark(round.slots(me(), 0, last), lanes * k * int64_t{sizeof(uint2)});
  }
  __device__ int me() const { return round.a.group.rank; }
  __device__ int source_of(int lane) const { return lane / static_cast<int>(round.a.num_tokens); }

 private:
  __device__ const uint4* address(int lane, int col) const {
    return reinterpret_cast<const uint4*>(round.row(me(), lane) + col);
  }
  __device__ uint2 arrived_slot(int at) const {
    const uint2* const from = round.slots(me(), 0) + at;
    uint2 words;
    operation.wait(source_of(at / static_cast<int>(round.a.shape.top_k)), [&](uint32_t&) {
      words = cuda::load_words(from);
      return cuda::has_arrived(words);
    });
    return words;
  }
  // num_bytes: a multiple of 16.
  static __device__ void mark(void* words, int64_t num_bytes) {
    auto* const vectors = static_cast<uint4*>(words);
    const auto count = static_cast<int>(num_bytes / int64_t{sizeof(uint4)});
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int i = static_cast<int>(blockIdx.x) * 32 + lane; i < count; i += static_cast<int>(gridDim.x) * 32)
      cuda::mark_unsent(vectors + i);
  }
};

// The sums of two columns go to the lane's rank.
struct ReturnedSums {
  const LaneInput& input;
  __device__ ReturnedSums(const Args&, const LaneInput& in) : input(in) {}
  __device__ void put(int t, int col, const float2& sum, const float2&) const {
    const A2aRound& a = input.round.a;
    const int rank = input.source_of(t), token = t - rank * static_cast<int>(a.num_tokens);
    if (a.shape.result_format == A2aResultFormat::kF32)
      cuda::store_words(input.round.sum<float>(rank, token, input.me()) + col,
                        cuda::sendable(uint2{__float_as_uint(sum.x), __float_as_uint(sum.y)}));
    else
      cuda::store_words(input.round.sum<bf16>(rank, token, input.me()) + col,
                        cuda::sendable(ptx::bf16_pair(sum.x, sum.y)));
  }
};

}  // namespace fp4moe::few
