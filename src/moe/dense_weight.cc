#include "moe/dense_weight.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>

#include "base/check.h"

namespace fp4moe {
namespace {

int64_t total_rows(std::span<const LinearPart> parts) {
  int64_t rows = 0;
  for (const LinearPart& part : parts) rows += part.num_rows();
  return rows;
}

// The stacked parts' elements of elem_bytes bytes, which begin at data(part): the source itself for a single
// whole part, else a copy in `storage`.
template <class Data>
Result<const uint8_t*> stack_rows(std::span<const LinearPart> parts, int64_t elem_bytes, const Data& data,
                                  Buffer& storage) {
  if (parts.size() == 1 && parts[0].is_whole()) return data(parts[0]);
  const int64_t row_bytes = parts[0].num_cols() * elem_bytes;
  FP4MOE_ASSIGN_OR_RETURN(storage, Buffer::make(total_rows(parts) * row_bytes));
  uint8_t* at = storage.data();
  for (const LinearPart& part : parts) {
    copy_rows(part, {data(part), part.weights.k * elem_bytes, part.cols.first * elem_bytes, row_bytes}, at);
    at += part.num_rows() * row_bytes;
  }
  return storage.data();
}

bool has_one_column_block(const LinearPart& part) {
  return part.cols.first / part.weights.fp8.col_block ==
         (part.cols.first + part.num_cols() - 1) / part.weights.fp8.col_block;
}

// The columns of a block of the stacked matrix: all, or the most that are in the same block of every part.
Result<int64_t> stacked_col_block(std::span<const LinearPart> parts) {
  int64_t block = 0;
  for (const LinearPart& part : parts) {
    if (has_one_column_block(part)) continue;
    block = std::gcd(block, std::gcd(part.weights.fp8.col_block, part.cols.first));
    if (block % kFp8ColumnStep != 0)
      return unsupported("columns [" + std::to_string(part.cols.first) + ", " +
                         std::to_string(part.cols.first + part.num_cols()) +
                         ") of an FP8 matrix cut a scale "
                         "block of " +
                         std::to_string(part.weights.fp8.col_block) +
                         "; tensor-parallel shards must begin at multiples of " +
                         std::to_string(kFp8ColumnStep) + " columns");
  }
  const int64_t k = parts[0].num_cols();
  return block == 0 || block > k ? k : block;
}

// For each stacked row: the first of its scales in the source.
std::vector<const float*> row_scales(std::span<const LinearPart> parts) {
  std::vector<const float*> scales;
  for (const LinearPart& part : parts) {
    const Fp8LinearView& w = part.weights.fp8;
    const int64_t per_row = (part.weights.k + w.col_block - 1) / w.col_block;
    for (int64_t i = 0; i < part.num_rows(); ++i)
      scales.push_back(w.scales + part.source_row(i) / w.row_block * per_row);
  }
  return scales;
}

// The rows of a block of the stacked matrix: the most with which no block has rows of two source blocks.
int64_t stacked_row_block(const std::vector<const float*>& scales) {
  int64_t block = 0;
  for (size_t i = 1; i < scales.size(); ++i)
    if (scales[i] != scales[i - 1]) block = std::gcd(block, static_cast<int64_t>(i));
  return block == 0 ? std::ssize(scales) : block;
}

// The scales of the stacked matrix.
std::vector<float> stack_scales(std::span<const LinearPart> parts, const std::vector<const float*>& sources,
                                const Fp8Shape& shape) {
  std::vector<float> scales;
  size_t part_end = 0;
  const LinearPart* part = parts.data() - 1;
  for (int64_t row = 0; row < shape.n; row += shape.row_block) {
    while (static_cast<size_t>(row) >= part_end) part_end += static_cast<size_t>((++part)->num_rows());
    for (int64_t col = 0; col < shape.k; col += shape.col_block)
      scales.push_back(
          sources[static_cast<size_t>(row)][(part->cols.first + col) / part->weights.fp8.col_block]);
  }
  return scales;
}

Result<Fp8Weight> put_fp8(const DenseOps& ops, std::span<const LinearPart> parts, ThreadPool& pool) {
  if (!ops.has_fp8)
    return unsupported(std::string("FP8 linear layers do not run on '") + ops.name +
                       "'; nearest legal choice: --device cpu");
  const std::vector<const float*> sources = row_scales(parts);
  FP4MOE_ASSIGN_OR_RETURN(const int64_t col_block, stacked_col_block(parts));
  const Fp8Shape shape{std::ssize(sources), parts[0].num_cols(), stacked_row_block(sources), col_block};
  const std::vector<float> scales = stack_scales(parts, sources, shape);
  const Fp8Source source = [&](Buffer& storage) -> Result<Fp8LinearView> {
    const auto codes_of = [](const LinearPart& part) { return part.weights.fp8.codes; };
    FP4MOE_ASSIGN_OR_RETURN(const uint8_t* codes, stack_rows(parts, 1, codes_of, storage));
    return Fp8LinearView{codes, scales.data(), shape.row_block, shape.col_block};
  };
  return put_fp8_weight(source, shape, ops, pool);
}

}  // namespace

void copy_rows(const LinearPart& part, const RowBytes& row, uint8_t* dst) {
  for (int64_t i = 0; i < part.num_rows(); ++i)
    std::memcpy(dst + i * row.num_bytes, row.src + part.source_row(i) * row.stride + row.offset,
                static_cast<size_t>(row.num_bytes));
}

std::vector<int64_t> row_range(int64_t first, int64_t count) {
  std::vector<int64_t> rows(static_cast<size_t>(count));
  std::iota(rows.begin(), rows.end(), first);
  return rows;
}

bool can_stack(std::span<const LinearPart> parts) {
  return std::all_of(parts.begin(), parts.end(), [&](const LinearPart& part) {
    return !part.weights.is_fp4 && part.weights.is_fp8() == parts[0].weights.is_fp8();
  });
}

Result<DenseWeight> DenseWeight::make(const DenseOps& ops, std::span<const LinearPart> parts,
                                      ThreadPool& pool) {
  FP4MOE_CHECK(can_stack(parts), "parts in different formats cannot be stacked");
  DenseWeight weight;
  weight.n_ = total_rows(parts);
  weight.k_ = parts[0].num_cols();
  for (const LinearPart& part : parts)
    FP4MOE_CHECK(part.num_cols() == weight.k_, "stacked parts must have equally many columns");
  if (parts[0].weights.is_fp8()) {
    weight.format_ = LinearFormat::kFp8;
    FP4MOE_ASSIGN_OR_RETURN(weight.fp8_, put_fp8(ops, parts, pool));
    return weight;
  }
  const LinearSource source = [&](Buffer& storage) -> Result<const bf16*> {
    const auto values_of = [](const LinearPart& part) {
      return reinterpret_cast<const uint8_t*>(part.weights.weight);
    };
    FP4MOE_ASSIGN_OR_RETURN(const uint8_t* rows, stack_rows(parts, sizeof(bf16), values_of, storage));
    return reinterpret_cast<const bf16*>(rows);
  };
  weight.format_ = linear_format(ops.linear_layout);
  if (weight.format_ == LinearFormat::kFp8) {
    FP4MOE_ASSIGN_OR_RETURN(weight.fp8_, put_quantized_fp8_weight(source, weight.n_, weight.k_, ops, pool));
  } else {
    FP4MOE_ASSIGN_OR_RETURN(weight.bf16_, put_linear_weight(source, weight.n_, weight.k_, ops, pool));
  }
  return weight;
}

LinearArgs DenseWeight::args(const ActRows& x, const float* bias, float* out, bool accumulate) const {
  return {.x = x,
          .weight = bf16_.data(),
          .bias = bias,
          .out = out,
          .n = n_,
          .accumulate = accumulate,
          .format = format_,
          .fp8 = fp8_.view};
}

WeightBytes DenseWeight::bytes() const {
  if (format_ == LinearFormat::kFp8) return {fp8_.view.codes, n_ * k_};
  return {bf16_.data(), bf16_.num_bytes()};
}

}  // namespace fp4moe
