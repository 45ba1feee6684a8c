// How linear_few.cu cuts K into chunks, and the layout of its shared memory: plain arithmetic for host and
// device. elem_bytes: of a weight, 2 (bf16) or 1 (FP8).
#pragma once

#include "kernels/cuda/dense/linear_few.h"

namespace fp4moe::few_linear {

constexpr int kWarps = 8;  // warps that multiply; one more warp copies
constexpr int kThreads = kWarps * 32;
constexpr int kBlockThreads = kThreads + 32;
constexpr int kStageRows = 8;  // weight rows per stage; two stages are the 16 rows of a tile
constexpr int kTileRows = 2 * kStageRows;
constexpr int kMaxChunkBytes = 3072;  // of a row, per stage
constexpr int kMaxStages = 16, kGoodStages = 4, kMinStages = 2;
// Bytes of weights that an SM requests at once before x is there. They keep the HBM busy; with more, the
// loads of x, and those of the kernel before on the same SM, wait behind them.
constexpr int kEarlyBytes = 52 << 10;
constexpr int kMaxTokens = 16;
// Rows whose sums are kept until they are added over the warps.
constexpr int group_rows_of(int num_tokens) { return (num_tokens <= kFewLoneTokens ? 6 : 3) * kTileRows; }
constexpr int kStepK = kWarps * 32, kPairK = 2 * kStepK;  // k's for all warps at once, and for two such steps

constexpr int padded_to(int k, int multiple) { return (k + multiple - 1) / multiple * multiple; }
// Returns the bytes for a row of `k` elements, a multiple of 32, in shared memory. The rows that a load
// instruction reads at once start in different banks: two rows of 16-byte or four of 8-byte pieces.
constexpr int pitch_of(int k, int elem_bytes) { return (k + 32) * elem_bytes; }
// Returns the length of the chunks into which K is cut, a multiple of 32 (the last chunk may be shorter). A
// stage holds one chunk, padded with zeros to whole steps.
constexpr int chunk_of(int k, int elem_bytes) {
  int best = 0, best_padded = 0;
  const int most = kMaxChunkBytes / elem_bytes, least = (k + most - 1) / most;
  for (int chunks = least; chunks <= least + 1; ++chunks) {
    const int chunk = (k / 32 + chunks - 1) / chunks * 32, all = chunks * padded_to(chunk, kPairK);
    if (best == 0 || all < best_padded) best = chunk, best_padded = all;
  }
  return best;
}

// Bytes from the start of a block's shared memory:
//
//   0         weights, [num_stages][kStageRows][stage_pitch]: a chunk of each row
//   x         tokens, [T][x_pitch], bf16
//   sums      [kWarps][T][group_rows], f32
//   squares   [kWarps][kMaxTokens], f32: with the norm
//   barriers  full and empty, [kMaxStages] each, and the barrier for x
//   loaded    int32: not 0 once x is there
struct FewLayout {
  int num_stages, early_stages, num_chunks, chunk, last_chunk, padded_chunk, padded_k, stage_pitch,
      stage_bytes, x, x_pitch, group_rows, sums, squares, barriers, loaded, end;
};

// early_bytes: a block's share of kEarlyBytes.
constexpr FewLayout few_layout(int num_tokens, int k, int elem_bytes, int num_stages, int early_bytes = 0) {
  FewLayout layout{};
  layout.chunk = chunk_of(k, elem_bytes);
  layout.num_stages = num_stages;
  layout.num_chunks = (k + layout.chunk - 1) / layout.chunk;
  layout.last_chunk = k - (layout.num_chunks - 1) * layout.chunk;
  layout.padded_chunk = padded_to(layout.chunk, kPairK);
  layout.padded_k = (layout.num_chunks - 1) * layout.chunk + layout.padded_chunk;
  layout.stage_pitch = pitch_of(layout.padded_chunk, elem_bytes);
  layout.stage_bytes = kStageRows * layout.stage_pitch;
  layout.early_stages = early_bytes / layout.stage_bytes;
  if (layout.early_stages < 1) layout.early_stages = 1;
  if (layout.early_stages > num_stages) layout.early_stages = num_stages;
  layout.x = num_stages * layout.stage_bytes;
  layout.x_pitch = pitch_of(padded_to(layout.padded_k, 64), 2);
  layout.group_rows = group_rows_of(num_tokens);
  layout.sums = layout.x + num_tokens * layout.x_pitch;
  layout.squares = layout.sums + kWarps * num_tokens * layout.group_rows * 4;
  layout.barriers = layout.squares + kWarps * kMaxTokens * 4;
  layout.loaded = layout.barriers + (2 * kMaxStages + 1) * 8;
  layout.end = layout.loaded + 8;
  return layout;
}

}  // namespace fp4moe::few_linear
