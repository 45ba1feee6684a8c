#include "model/linear_layer.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/check.h"

namespace fp4moe {
namespace {

bool is_whole(const LinearPart& part) { return part.rows.empty() && part.cols.count == 0; }
int64_t num_rows(const LinearPart& part) {
  return part.rows.empty() ? part.weights.n : static_cast<int64_t>(part.rows.size());
}
int64_t num_cols(const LinearPart& part) { return part.cols.count > 0 ? part.cols.count : part.weights.k; }
int64_t source_row(const LinearPart& part, int64_t i) {
  return part.rows.empty() ? i : part.rows[static_cast<size_t>(i)];
}

// Copies num_bytes at `offset` in each of the part's rows from `src` (`stride` bytes per row) to dst [rows,
// num_bytes].
struct RowBytes {
  const uint8_t* src;
  int64_t stride, offset, num_bytes;
};
void copy_rows(const LinearPart& part, const RowBytes& row, uint8_t* dst) {
  for (int64_t i = 0; i < num_rows(part); ++i)
    std::memcpy(dst + i * row.num_bytes, row.src + source_row(part, i) * row.stride + row.offset,
                static_cast<size_t>(row.num_bytes));
}

// A view of the part's matrix: the source's if the part is whole, else a copy in `storage`. The caller sets
// the bias.
Result<LinearWeightsView> cut_fp4(const LinearPart& part, Buffer& storage) {
  LinearWeightsView view = part.weights;
  if (is_whole(part)) return view;
  Fp4MatrixView& m = view.fp4;
  const int64_t block = fp4_block(m.format), n = num_rows(part), k = num_cols(part);
  if (part.cols.first % block != 0 || k % block != 0)
    return unsupported("columns [" + std::to_string(part.cols.first) + ", " +
                       std::to_string(part.cols.first + k) + ") of an " + fp4_format_name(m.format) +
                       " matrix cut a scale block of " + std::to_string(block) +
                       "; tensor-parallel shards must have whole blocks");
  FP4MOE_ASSIGN_OR_RETURN(storage, Buffer::make(n * (k / 2 + k / block)));
  uint8_t* scales = storage.data() + n * (k / 2);
  copy_rows(part, {m.codes, m.code_stride_bytes, part.cols.first / 2, k / 2}, storage.data());
  copy_rows(part, {m.scales, m.scale_stride_bytes, part.cols.first / block, k / block}, scales);
  m.codes = storage.data();
  m.scales = scales;
  m.code_stride_bytes = k / 2;
  m.scale_stride_bytes = k / block;
  view.n = m.rows = n;
  view.k = m.cols = k;
  return view;
}

// The stacked parts: the source itself for a single whole part, else a copy in `storage`.
Result<const bf16*> stack_bf16(std::span<const LinearPart> parts, Buffer& storage) {
  if (parts.size() == 1 && is_whole(parts[0])) return parts[0].weights.weight;
  const int64_t row_bytes = num_cols(parts[0]) * int64_t{sizeof(bf16)};
  int64_t num_bytes = 0;
  for (const LinearPart& part : parts) num_bytes += num_rows(part) * row_bytes;
  FP4MOE_ASSIGN_OR_RETURN(storage, Buffer::make(num_bytes));
  uint8_t* at = storage.data();
  for (const LinearPart& part : parts) {
    copy_rows(part,
              {reinterpret_cast<const uint8_t*>(part.weights.weight), part.weights.k * 2, part.cols.first * 2,
               row_bytes},
              at);
    at += num_rows(part) * row_bytes;
  }
  return storage.as<bf16>();
}

}  // namespace

void run_norm(const DenseOps& ops, const RmsNormArgs& norm, ThreadPool& pool) {
  if (!norm.is_done) ops.rms_norm(norm, pool);
}

Result<LinearLayer> LinearLayer::make(const MoePlan& plan, const DenseOps& ops,
                                      std::span<const LinearPart> parts, ThreadPool& pool) {
  LinearLayer layer;
  layer.ops_ = &ops;
  layer.k_ = num_cols(parts[0]);
  std::vector<bf16> bias;  // [N] or empty
  for (const LinearPart& part : parts) {
    layer.n_ += num_rows(part);
    for (int64_t i = 0; part.weights.bias != nullptr && i < num_rows(part); ++i)
      bias.push_back(part.weights.bias[source_row(part, i)]);
    FP4MOE_CHECK(num_cols(part) == layer.k_ && (!part.weights.is_fp4 || parts.size() == 1),
                 "the parts of a layer must have equally many columns, and an FP4 part must be the only one");
  }
  FP4MOE_CHECK(bias.empty() || std::ssize(bias) == layer.n_, "either all parts or none must have a bias");
  if (parts[0].weights.is_fp4) {
    Buffer storage;
    FP4MOE_ASSIGN_OR_RETURN(LinearWeightsView view, cut_fp4(parts[0], storage));
    view.bias = bias.empty() ? nullptr : bias.data();
    FP4MOE_ASSIGN_OR_RETURN(layer.fp4_, Fp4Linear::make(plan, view, pool));
    return layer;
  }
  FP4MOE_ASSIGN_OR_RETURN(layer.bias_, Buffer::copy_of(bf16_to_floats(bias), ops.memory()));
  const LinearSource source = [&](Buffer& storage) { return stack_bf16(parts, storage); };
  FP4MOE_ASSIGN_OR_RETURN(layer.weight_, put_linear_weight(source, layer.n_, layer.k_, ops, pool));
  return layer;
}

void LinearLayer::forward_linear(const ActRows& x, float* out, bool accumulate, Arena& scratch,
                                 ThreadPool& pool) const {
  if (!fp4_) return ops_->linear({x, weight_.as<bf16>(), bias_.as<float>(), out, n_, accumulate}, pool);
  const int64_t mark = scratch.used_bytes();
  fp4_->forward_fp4_linear(x, out, n_, accumulate, scratch, pool);
  scratch.rewind(mark);
}

void LinearLayer::forward_normed(const RmsNormArgs& norm, float* out, Arena& scratch,
                                 ThreadPool& pool) const {
  if (!fp4_ && !norm.is_done)
    return ops_->norm_linear({norm, {norm.out_act, weight_.as<bf16>(), bias_.as<float>(), out, n_, false}},
                             pool);
  run_norm(*ops_, norm, pool);
  forward_linear(norm.out_act, out, /*accumulate=*/false, scratch, pool);
}

}  // namespace fp4moe
