// The row order of W13, the first GEMM's weight [2I, K]: which row is gate (w1) i and which is up (w3) i.
// Changing the order is a permutation of rows, the same for codes, linear scales and biases, before any
// swizzle.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

enum class W13Arrangement : uint8_t {
  kGateUp,         // gate[0..I), up[0..I): Hugging Face checkpoints; cutedsl v1
  kUpGate,         // up[0..I), gate[0..I): cutlass
  kGateUpPairs,    // gate 0, up 0, gate 1, up 1, ...: gpt-oss checkpoints
  kUpGatePairs,    // up 0, gate 0, up 1, gate 1, ...: trtllm-gen, before its shuffle
  kUpGateBlocks64  // up[0..64), gate[0..64), up[64..128), ...: cutedsl v2; I % 64 == 0
};

// trtllm-gen's shuffle of rows within blocks, for its epilogue. It is applied to W13 after the arrangement,
// and to W2.
enum class RowShuffle : uint8_t {
  kNone,
  kBlocks32,  // for epilogue tiles of a multiple of 128 rows: row j of a block is old row 4 (j % 8) + j / 8
  kBlocks16,  // for other tiles: row j of a block is old row 2 (j % 8) + j / 8
};

struct W13Order {
  W13Arrangement arrangement = W13Arrangement::kGateUp;
  RowShuffle shuffle = RowShuffle::kNone;
  friend bool operator==(const W13Order&, const W13Order&) = default;
};

// For example "up_gate_pairs+shuffle32".
std::string w13_order_name(W13Order order);

// source_row[r]: the row of the old matrix that becomes row r of the new one. A bijection.
using RowPermutation = std::vector<int64_t>;

// Returns the permutation from the kGateUp matrix to `order`, or kInvalidArgument, which names the order, if
// intermediate_size is out of range or not a multiple of the order's block.
Result<RowPermutation> w13_rows(W13Order order, int64_t intermediate_size);
// Returns the permutation from one order to another; for the inverse, exchange them.
Result<RowPermutation> w13_conversion(W13Order from, W13Order to, int64_t intermediate_size);
// Returns the permutation of the shuffle alone, for W2 [num_rows, K].
Result<RowPermutation> shuffle_rows(RowShuffle shuffle, int64_t num_rows);

RowPermutation inverse(const RowPermutation& permutation);
// Copies src row source_row[r] to dst row r; rows have row_bytes bytes. src and dst must not overlap.
void permute_rows(const uint8_t* src, std::span<const int64_t> source_row, int64_t row_bytes, uint8_t* dst);

}  // namespace fp4moe
