#include "formats/w13_order.h"

#include <cstring>

#include "base/check.h"

namespace fp4moe {
namespace {

const char* arrangement_name(W13Arrangement arrangement) {
  switch (arrangement) {
    case W13Arrangement::kGateUp:
      return "gate_up";
    case W13Arrangement::kUpGate:
      return "up_gate";
    case W13Arrangement::kGateUpPairs:
      return "gate_up_pairs";
    case W13Arrangement::kUpGatePairs:
      return "up_gate_pairs";
    case W13Arrangement::kUpGateBlocks64:
      return "up_gate_blocks64";
  }
  return "invalid";
}

int64_t shuffle_block(RowShuffle shuffle) {
  switch (shuffle) {
    case RowShuffle::kNone:
      return 1;
    case RowShuffle::kBlocks32:
      return 32;
    case RowShuffle::kBlocks16:
      return 16;
  }
  return 1;
}

// Returns the kGateUp row that `arrangement` puts at row r.
int64_t arranged_row(W13Arrangement arrangement, int64_t r, int64_t intermediate_size) {
  const int64_t gate = 0, up = intermediate_size;
  switch (arrangement) {
    case W13Arrangement::kGateUp:
      return r;
    case W13Arrangement::kUpGate:
      return r < intermediate_size ? up + r : gate + r - intermediate_size;
    case W13Arrangement::kGateUpPairs:
      return (r % 2 == 0 ? gate : up) + r / 2;
    case W13Arrangement::kUpGatePairs:
      return (r % 2 == 0 ? up : gate) + r / 2;
    case W13Arrangement::kUpGateBlocks64:
      return (r / 64 % 2 == 0 ? up : gate) + r / 128 * 64 + r % 64;
  }
  return r;
}

}  // namespace

std::string w13_order_name(W13Order order) {
  std::string name = arrangement_name(order.arrangement);
  if (order.shuffle != RowShuffle::kNone) name += "+shuffle" + std::to_string(shuffle_block(order.shuffle));
  return name;
}

Result<RowPermutation> shuffle_rows(RowShuffle shuffle, int64_t num_rows) {
  const int64_t block = shuffle_block(shuffle);
  if (num_rows < 0 || num_rows % block != 0)
    return invalid_argument("cannot shuffle " + std::to_string(num_rows) + " rows in blocks of " +
                            std::to_string(block) + "; the number of rows must be a multiple");
  RowPermutation source_row(static_cast<size_t>(num_rows));
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t j = r % block;
    source_row[r] = block == 1 ? r : r - j + block / 8 * (j % 8) + j / 8;
  }
  return source_row;
}

Result<RowPermutation> w13_rows(W13Order order, int64_t intermediate_size) {
  constexpr int64_t kMost = int64_t{1} << 24;  // far above any model; bounds allocation for a corrupt size
  const int64_t multiple = order.arrangement == W13Arrangement::kUpGateBlocks64 ? 64 : 1;
  if (intermediate_size <= 0 || intermediate_size > kMost || intermediate_size % multiple != 0)
    return invalid_argument("W13 order " + w13_order_name(order) + " cannot hold intermediate_size=" +
                            std::to_string(intermediate_size) + "; it must be a multiple of " +
                            std::to_string(multiple) + " between 1 and " + std::to_string(kMost));
  auto rows = shuffle_rows(order.shuffle, 2 * intermediate_size);
  if (!rows.ok()) return rows.status().with_context("W13 order " + w13_order_name(order));
  for (int64_t& r : *rows) r = arranged_row(order.arrangement, r, intermediate_size);
  return rows;
}

Result<RowPermutation> w13_conversion(W13Order from, W13Order to, int64_t intermediate_size) {
  FP4MOE_ASSIGN_OR_RETURN(const RowPermutation from_rows, w13_rows(from, intermediate_size));
  FP4MOE_ASSIGN_OR_RETURN(RowPermutation source_row, w13_rows(to, intermediate_size));
  const RowPermutation row_in_from = inverse(from_rows);
  for (int64_t& r : source_row) r = row_in_from[r];
  return source_row;
}

RowPermutation inverse(const RowPermutation& permutation) {
  RowPermutation inverted(permutation.size());
  for (size_t r = 0; r < permutation.size(); ++r) inverted[permutation[r]] = static_cast<int64_t>(r);
  return inverted;
}

void permute_rows(const uint8_t* src, std::span<const int64_t> source_row, int64_t row_bytes, uint8_t* dst) {
  for (size_t r = 0; r < source_row.size(); ++r)
    std::memcpy(dst + static_cast<int64_t>(r) * row_bytes, src + source_row[r] * row_bytes,
                static_cast<size_t>(row_bytes));
}

}  // namespace fp4moe
