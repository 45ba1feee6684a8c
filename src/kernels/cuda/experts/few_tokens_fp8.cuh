// The part of few_tokens.cu that only w4a8 uses: x and h in shared memory as the f16 values of their e4m3
// codes, and the table in which FP4 codes are looked up. Device code only.
//
// A row is staged as bf16 while warps find its largest element, and is quantised in place after a barrier.
// For x this overlaps the loads of the first weights; for h it takes about 0.1 us per layer.
#pragma once

#include "kernels/cuda/experts/few_tokens_feed.cuh"
#include "kernels/cuda/experts/fp4_to_fp8.cuh"
#include "kernels/cuda/experts/fp8_tokens.cuh"

namespace fp4moe::few {

constexpr int kWeightThreads = kWarps * 32;  // all but the helper warp

// Address in shared memory of a 16-byte piece of a row: columns 8 * piece to 8 * piece + 7.
__device__ __forceinline__ uint4* fp8_piece_at(uint8_t* act, int row, int row_bytes, int piece) {
  return reinterpret_cast<uint4*>(act + few_act_offset(row, row_bytes, few_fp8_act_word(piece * 8)));
}

// Clears the warp's maxima and returns their address.
__device__ __forceinline__ float* clear_most(Fp8Shared& fp8) {
  float* most = fp8.most[threadIdx.x / 32];
  if (threadIdx.x % 32 < 2 * kFewMaxTokens) most[threadIdx.x % 32] = 0;
  __syncwarp();
  return most;
}
// Raises a row's maximum to the largest of the lanes' values. Called by the whole warp.
__device__ __forceinline__ void note_most(float* of_warp, int row, float most) {
  most = most_of_lanes(~0u, most);
  if (threadIdx.x % 32 == 0) of_warp[row] = fmaxf(of_warp[row], most);
}

// Stages x as bf16, 32 pieces of a row per warp at a time. Called by all warps but the helper.
template <class Input>
__device__ inline void stage_raw_x(const Args& a, const Input& input, Fp8Shared& fp8, uint8_t* act) {
  const int row_bytes = a.plan.up.steps() * kFewRowStepBytes, h = static_cast<int>(a.moe.experts.hidden_size);
  const int pieces = row_bytes / 16, chunks = (pieces + 31) / 32;
  const int total = chunks * static_cast<int>(a.moe.num_tokens), lane = threadIdx.x % 32;
  constexpr int kAtOnce = 4;
  float* most = clear_most(fp8);
  for (int begin = threadIdx.x / 32; begin < total; begin += kAtOnce * kWarps) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int chunk = begin + i * kWarps, t = chunk / chunks, col = ((chunk - t * chunks) * 32 + lane) * 8;
      v[i] = {0, 0, 0, 0};
      if (chunk < total && col < h) v[i] = input.piece(a, t, col);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int chunk = begin + i * kWarps, t = chunk / chunks, piece = (chunk - t * chunks) * 32 + lane;
      if (chunk >= total) break;
      if (piece * 8 < h) input.await(a, t, piece * 8, v[i]);
      if (piece < pieces) *fp8_piece_at(act, t, row_bytes, piece) = v[i];
      note_most(most, t, most_of_piece(v[i], 0));
    }
  }
}

// Stages the rows of h that the CTA's part of `down` reads. Each thread has kAtOnce loads in flight and
// stores the values as they become valid. Called by all threads.
template <class Input>
__device__ inline void stage_raw_h(const Args& a, const Input& input, Fp8Shared& fp8, const RowsOfH& rows,
                                   uint8_t* act) {
  const int row_bytes = a.plan.down.steps() * kFewRowStepBytes, pairs = row_bytes / 8;  // of words
  const auto i_size = static_cast<int>(a.moe.experts.intermediate_size);
  const int total = (rows.last - rows.first) * pairs;
  const Word* h = a.h + static_cast<int64_t>(rows.first) * pairs * 2;
  constexpr int kAtOnce = 4;
  float* most = clear_most(fp8);
  for (int begin = threadIdx.x; begin < total; begin += kAtOnce * kThreads) {
    TwoWords w[kAtOnce];
    const auto is_word = [&](int i) {  // the pair's group of 32 columns begins before I
      return i < total && i % pairs / 32 * 128 + i % 8 / 2 * 32 < i_size;
    };
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = begin + j * kThreads;
      w[j] = is_word(i) ? load_words(h + int64_t{i} * 2) : TwoWords{kThere, kThere};
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = begin + j * kThreads, row = i / pairs;
      if (i >= total) break;
      for (uint32_t polls = 0; !w[j].there() && input.goes_on(polls);) w[j] = load_words(h + int64_t{i} * 2);
      const uint2 v = {static_cast<uint32_t>(w[j].a), static_cast<uint32_t>(w[j].b)};
      *reinterpret_cast<uint2*>(act + few_act_offset(row, row_bytes, (i - row * pairs) * 2)) = v;
      note_most(most, row, most_of_pair(v.y, most_of_pair(v.x, 0)));
    }
  }
}

// Quantises the staged rows. Called by threads 0 ... num_threads - 1, after a barrier with the threads that
// staged the rows. Each warp takes pieces of one row at a time.
__device__ inline void quantise_rows(Fp8Shared& fp8, int num_rows, int row_bytes, int num_threads,
                                     float* scales, uint8_t* act) {
  const int lane = threadIdx.x % 32, warps = num_threads / 32, pieces = row_bytes / 16,
            chunks = (pieces + 31) / 32;
  int row = -1;
  float inverse = 0;
  for (int chunk = threadIdx.x / 32; chunk < num_rows * chunks; chunk += warps) {
    const int of_row = chunk / chunks, piece = (chunk - of_row * chunks) * 32 + lane;
    if (of_row != row) {
      row = of_row;
      const Fp8Scale scale(most_of_lanes(~0u, lane < warps ? fp8.most[lane][row] : 0));
      inverse = scale.inverse;
      if (lane == 0) scales[row] = scale.scale;  // every warp with a part of the row writes the same scale
    }
    if (piece >= pieces) continue;
    uint4* at = fp8_piece_at(act, row, row_bytes, piece);
    *at = fp8_piece_as_f16(*at, inverse);
  }
}

// Fills the table and, after a barrier, quantises the rows that stage_raw_x() staged. Called by all warps but
// the helper.
template <Fp4Format kFormat>
__device__ inline void quantise_x(const Args& a, Fp8Shared& fp8, uint8_t* act) {
  auto* table = reinterpret_cast<uint8_t*>(fp8.table);
  for (int i = threadIdx.x; i < 128 * 8; i += kWeightThreads)
    table[i] = fp8_operand_byte<kFormat>(i / 8, i % 8);
  ptx::named_barrier(1, kWeightThreads);
  quantise_rows(fp8, static_cast<int>(a.moe.num_tokens), a.plan.up.steps() * kFewRowStepBytes, kWeightThreads,
                fp8.x_scales, act);
}

// Stages and quantises h. Called by all threads.
template <class Input>
__device__ inline void stage_fp8_h(const Args& a, const Shared& s, const Input& input, const Part& down,
                                   uint8_t* act) {
  Fp8Shared& fp8 = fp8_of(s);
  const RowsOfH rows(s, down);
  stage_raw_h(a, input, fp8, rows, act);
  __syncthreads();
  quantise_rows(fp8, rows.last - rows.first, a.plan.down.steps() * kFewRowStepBytes, kThreads, fp8.h_scales,
                act);
}

}  // namespace fp4moe::few
