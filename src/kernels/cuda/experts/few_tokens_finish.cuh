// The epilogue of few_tokens.cu's strips: activation, stores of h and y, and the sum over a token's experts.
// Device code only.
#pragma once

#include "formats/bf16.h"
#include "kernels/cuda/comm/partial_sender.cuh"
#include "kernels/cuda/experts/few_tokens_feed.cuh"
#include "kernels/cuda/ptx/ptx_mma.cuh"

namespace fp4moe::few {

// A strip as seen by one lane, which has the sums of rows g and g + 8 for columns 2 q and 2 q + 1, where a
// column is a token of the expert.
template <class W>
struct Strip {
  int in_expert;  // the strip's index within its expert
  int first_row, columns;
  float scales[2], bias[2];               // of rows g and g + 8
  float row_factors[2], token_scales[2];  // w4a8: of those rows, and of columns 2 q and 2 q + 1
  uint32_t b, pairs_b;  // shared addresses of k tile 0's B fragments: for all columns; for column pairs
  bool has_pairs_b;     // pairs_b's column exists
  int swap;             // bytes from one half of a tile in b to the other

  Strip() = default;  // no strip
  __device__ __forceinline__ Strip(const Args& a, const Shared& s, const Part& part, bool down, int strip,
                                   const uint8_t* act) {
    const TiledExperts& experts = a.moe.experts;
    const int lane = threadIdx.x % 32, g = lane / 4, rank = strip / part.phase.by_strips;
    in_expert = strip - rank * part.phase.strips;
    first_row = s.first_row[rank], columns = s.first_row[rank + 1] - first_row;
    const auto place_of = [&](int column) {
      const int row = first_row + column;
      return down ? row - s.first_row[part.first_strip / part.phase.by_strips] : s.token_of_row[row];
    };
    const auto address_of = [&](int place, int half) {
      return ptx::shared_address(act) + place * part.phase.steps() * kFewRowStepBytes +
             (half ^ place % 2) * 64 + lane % 4 * 16;
    };
    const int place = place_of(min(g, columns - 1));
    b = address_of(place, 0);
    swap = 64 - place % 2 * 128;
    has_pairs_b = g % 2 < columns;
    const int pairs_place = place_of(min(g % 2, columns - 1));
    pairs_b = W::kFormat == Fp4Format::kMxfp4 ? address_of(pairs_place, g / 2 % 2) + g / 4 * 128
                                              : address_of(pairs_place, g / 4) + g / 2 % 2 * 8;

    const int64_t e = s.expert[rank];
    const bool gated = is_gated(experts.activation.kind);
    scales[0] = experts.scales[e * 3 + (down ? 2 : gated ? 0 : 1)];
    scales[1] = experts.scales[e * 3 + (down ? 2 : 1)];
    if constexpr (W::kFp8) take_factors(a, s, down, e, place_of);
    bias[0] = bias[1] = 0;
    const float* biases = down ? experts.down_bias : experts.gate_up_bias;
    if (biases == nullptr) return;
    const auto n = static_cast<int>(down ? experts.hidden_size : experts.intermediate_size);
    if (!down && gated) {
      const int i = in_expert * 8 + g;
      bias[0] = biases[e * 2 * n + i], bias[1] = biases[(e * 2 + 1) * n + i];
    } else {
      const int i = in_expert * 16 + g;
      if (i < n) bias[0] = biases[e * n + i];
      if (i + 8 < n) bias[1] = biases[e * n + i + 8];
    }
  }

 private:
  // w4a8: loads the weights' row factors and the tokens' scales. place_of(column): the column's row in shared
  // memory.
  template <class PlaceOf>
  __device__ __forceinline__ void take_factors(const Args& a, const Shared& s, bool down, int64_t expert,
                                               const PlaceOf& place_of) {
    const int lane = threadIdx.x % 32;
    const Fp8Matrix& matrix = down ? a.fp8_down : a.fp8_up;
    const uint8_t* weights = down ? a.moe.experts.down : a.moe.experts.gate_up;
    const auto* factors =
        reinterpret_cast<const float*>(weights + expert * matrix.bytes + matrix.factors_offset) +
        in_expert * 16 + lane / 4;
    row_factors[0] = factors[0], row_factors[1] = factors[8];  // not used until the sums are complete
    const Fp8Shared& fp8 = fp8_of(s);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int place = place_of(min(lane % 4 * 2 + i, columns - 1));
      token_scales[i] = down ? fp8.h_scales[place] : fp8.x_scales[place];
    }
  }
};

// Returns the strip's sum i times all its scales, plus the bias.
template <class W>
__device__ __forceinline__ float scaled(const Strip<W>& strip, const float (&sum)[4], int i) {
  float scale = strip.scales[i / 2];
  if constexpr (W::kFp8) scale *= strip.row_factors[i / 2] * strip.token_scales[i % 2];
  return sum[i] * (W::kFp8 ? 1.0f : kSumFactor) * scale + strip.bias[i / 2];
}

__device__ inline float activate(const Activation& act, float gate, float up) {
  switch (act.kind) {
    case ActivationKind::kSwigluOai: {
      const float g = gate > act.limit ? act.limit : gate;
      const float u = up > act.limit ? act.limit : (up < -act.limit ? -act.limit : up);
      return g / (1 + expf(-act.alpha * g)) * (u + act.beta);
    }
    case ActivationKind::kSilu:
      return gate / (1 + expf(-gate)) * up;
    default:
      return up < 0 ? 0 : up * up;
  }
}

// Stores h as pairs of elements. Lanes whose g differ only in the lowest bit have adjacent elements, both for
// columns 2 q and 2 q + 1: the lane with even g writes the pair of column 2 q, the lane with odd g that of
// column 2 q + 1. i: this lane's element. Called by the whole warp.
template <class W>
__device__ inline void put_h(const Args& a, const Strip<W>& strip, int i, float left, float right) {
  const int lane = threadIdx.x % 32, odd = lane / 4 % 2, column = lane % 4 * 2 + odd;
  const float other = __shfl_xor_sync(~0u, odd != 0 ? left : right, 4);
  if (column >= strip.columns || i >= a.moe.experts.intermediate_size) return;
  const int word = W::kFp8 ? few_fp8_act_word(i - odd) : few_act_word(i - odd);
  store_word(a.h + static_cast<int64_t>(strip.first_row + column) * h_words(a) + word,
             odd != 0 ? ptx::bf16_pair(other, right) : ptx::bf16_pair(left, other));
}

template <class W>
__device__ inline void finish_up(const Args& a, const Strip<W>& strip, const float (&sum)[4]) {
  const Activation& act = a.moe.experts.activation;
  const int g = threadIdx.x % 32 / 4;
  float v[4];
  for (int i = 0; i < 4; ++i) v[i] = scaled(strip, sum, i);
  if (is_gated(act.kind)) {
    put_h(a, strip, strip.in_expert * 8 + g, activate(act, v[0], v[2]), activate(act, v[1], v[3]));
  } else {
    put_h(a, strip, strip.in_expert * 16 + g, activate(act, 0, v[0]), activate(act, 0, v[1]));
    put_h(a, strip, strip.in_expert * 16 + g + 8, activate(act, 0, v[2]), activate(act, 0, v[3]));
  }
}

template <class W>
__device__ inline void finish_down(const Args& a, const Strip<W>& strip, const float (&sum)[4]) {
  const int lane = threadIdx.x % 32;
  const auto h = static_cast<int>(a.moe.experts.hidden_size);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = lane % 4 * 2 + i % 2, c = strip.in_expert * 16 + lane / 4 + i / 2 * 8;
    if (column < strip.columns && c < h)
      store_word(a.y + static_cast<int64_t>(strip.first_row + column) * h + c,
                 __float_as_uint(scaled(strip, sum, i)));
  }
}

// Sets the weights of the shared expert's slots. Called by all warps; each has at most one token.
__device__ inline void weigh_shared(const Args& a, Shared& s) {
  const SharedSlot& shared = a.moe.shared;
  const int t = kHelperWarp - static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (shared.gate == nullptr || t >= a.moe.num_tokens) return;
  const auto vectors = static_cast<int>(a.moe.experts.hidden_size / 4);
  const float4* x = reinterpret_cast<const float4*>(shared.x) + static_cast<int64_t>(t) * vectors;
  const float4* gate = reinterpret_cast<const float4*>(shared.gate);
  float sum = 0;
#pragma unroll 8
  for (int i = lane; i < vectors; i += 32) {
    const float4 v = __ldcg(x + i), w = __ldg(gate + i);
    sum = fmaf(v.x, w.x, sum), sum = fmaf(v.y, w.y, sum);
    sum = fmaf(v.z, w.z, sum), sum = fmaf(v.w, w.w, sum);
  }
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (lane == 0) s.weight_of_slot[(t + 1) * a.token_slots - 1] = 1 / (1 + expf(-sum));
}

// The outputs that a thread combines, two columns of a token each: `first` and every kThreads-th one after
// it, below `end`. Made before the sums are there.
struct Outputs {
  int first, end;
  float2 before = {0, 0};  // the first one's old values, if they are added to

  __device__ explicit Outputs(const Args& a) {
    const int total = static_cast<int>(a.moe.num_tokens * a.moe.experts.hidden_size / 2);
    first = few_cut(total, blockIdx.x, a.plan.by_ctas) + static_cast<int>(threadIdx.x);
    end = few_cut(total, blockIdx.x + 1, a.plan.by_ctas);
    if (first < end) before = old_values(a, first);
  }
  __device__ static float2 old_values(const Args& a, int i) {
    if (a.moe.out == nullptr || !a.moe.accumulate) return {0, 0};
    return reinterpret_cast<const float2*>(a.moe.out)[i];
  }
};

// Where combine() puts the sums of two columns: into the outputs, and to the peers if they are partial sums.
// few_tokens_lanes.cuh has another such type.
struct StoredSums {
  const DeviceMoeArgs& m;
  cuda::PartialSender sender;
  __device__ StoredSums(const Args& a, const StoredInput&) : m(a.moe), sender(a.peers) {}
  __device__ void put(int t, int col, float2 sum, const float2& before) const {
    const int64_t at = static_cast<int64_t>(t) * m.experts.hidden_size + col;
    if (m.out != nullptr) {
      if (m.accumulate) sum.x += before.x, sum.y += before.y;
      *reinterpret_cast<float2*>(m.out + at) = sum;
      sender.send(at, sum);
    }
    if (m.out_bf16 != nullptr) *reinterpret_cast<uint32_t*>(m.out_bf16 + at) = ptx::bf16_pair(sum.x, sum.y);
  }
};

// Puts each sum as soon as the y words of its columns are valid. Called by all threads.
template <class Sums, class Input>
__device__ inline void combine(const Args& a, const Shared& s, const Input& input, const Outputs& outputs) {
  const Sums sums(a, input);
  constexpr int kAtOnce = 12;  // experts whose words are loaded at once
  const int h = static_cast<int>(a.moe.experts.hidden_size), topk = a.token_slots;
  float2 before = outputs.before;
  for (int i = outputs.first; i < outputs.end; i += kThreads) {
    if (i != outputs.first) before = Outputs::old_values(a, i);
    const int t = i / (h / 2), col = i % (h / 2) * 2;
    float2 sum = {0, 0};
    for (int k0 = 0; k0 < topk; k0 += kAtOnce) {
      TwoWords y[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int row = k0 + j < topk ? s.row_of_slot[t * topk + k0 + j] : -1;
        y[j] = row < 0 ? TwoWords{kThere, kThere} : load_words(a.y + static_cast<int64_t>(row) * h + col);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int slot = t * topk + k0 + j, row = k0 + j < topk ? s.row_of_slot[slot] : -1;
        if (row < 0) continue;
        for (uint32_t polls = 0; !y[j].there() && input.goes_on(polls);)
          y[j] = load_words(a.y + static_cast<int64_t>(row) * h + col);
        sum.x = fmaf(s.weight_of_slot[slot], __uint_as_float(static_cast<uint32_t>(y[j].a)), sum.x);
        sum.y = fmaf(s.weight_of_slot[slot], __uint_as_float(static_cast<uint32_t>(y[j].b)), sum.y);
      }
    }
    sums.put(t, col, sum, before);
  }
}

}  // namespace fp4moe::few
