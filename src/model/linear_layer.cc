#include "model/linear_layer.h"

#include <string>
#include <vector>

#include "base/check.h"

namespace fp4moe {
namespace {

// A view of the part's matrix: the source's if the part is whole, else a copy in `storage`. The caller sets
// the bias.
Result<LinearWeightsView> cut_fp4(const LinearPart& part, Buffer& storage) {
  LinearWeightsView view = part.weights;
  if (part.is_whole()) return view;
  Fp4MatrixView& m = view.fp4;
  const int64_t block = fp4_block(m.format), n = part.num_rows(), k = part.num_cols();
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

}  // namespace

void run_norm(const DenseOps& ops, const RmsNormArgs& norm, ThreadPool& pool) {
  if (!norm.is_done) ops.rms_norm(norm, pool);
}

Result<LinearLayer> LinearLayer::make(const MoePlan& plan, const DenseOps& ops,
                                      std::span<const LinearPart> parts, ThreadPool& pool) {
  LinearLayer layer;
  layer.ops_ = &ops;
  layer.k_ = parts[0].num_cols();
  std::vector<bf16> bias;  // [N] or empty
  for (const LinearPart& part : parts) {
    layer.n_ += part.num_rows();
    for (int64_t i = 0; part.weights.bias != nullptr && i < part.num_rows(); ++i)
      bias.push_back(part.weights.bias[part.source_row(i)]);
    FP4MOE_CHECK(!part.weights.is_fp4 || parts.size() == 1, "an FP4 part must be the only one");
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
  FP4MOE_ASSIGN_OR_RETURN(layer.weight_, DenseWeight::make(ops, parts, pool));
  return layer;
}

void LinearLayer::forward_linear(const ActRows& x, float* out, bool accumulate, Arena& scratch,
                                 ThreadPool& pool, PartialsToSend* send) const {
  if (!fp4_) {
    LinearArgs args = weight_.args(x, bias_.as<float>(), out, accumulate);
    args.send = send;
    return ops_->linear(args, pool);
  }
  const int64_t mark = scratch.used_bytes();
  fp4_->forward_fp4_linear(x, out, n_, accumulate, scratch, pool);
  scratch.rewind(mark);
}

void LinearLayer::forward_normed(const RmsNormArgs& norm, float* out, Arena& scratch,
                                 ThreadPool& pool) const {
  if (!fp4_ && !norm.is_done)
    return ops_->norm_linear({norm, weight_.args(norm.out_act, bias_.as<float>(), out, false)}, pool);
  if (fp4_ && !norm.is_done && fp4_->forward_normed_fp4(norm, out)) return;
  run_norm(*ops_, norm, pool);
  forward_linear(norm.out_act, out, /*accumulate=*/false, scratch, pool);
}

void LinearLayer::forward_all_normed(const RmsNormArgs& norm, std::span<const Output> outputs, Arena& scratch,
                                     ThreadPool& pool) {
  const DenseOps& ops = *outputs[0].layer->ops_;
  if (outputs.size() == 1) return outputs[0].layer->forward_normed(norm, outputs[0].out, scratch, pool);
  const auto args = [&](const Output& o) {
    return o.layer->weight_.args(norm.out_act, o.layer->bias_.as<float>(), o.out, /*accumulate=*/false);
  };
  if (outputs.size() == 2 && !norm.is_done && !outputs[0].layer->fp4_ && !outputs[1].layer->fp4_)
    return ops.norm_linear({norm, args(outputs[0]), args(outputs[1])}, pool);
  run_norm(ops, norm, pool);
  for (const Output& o : outputs)
    o.layer->forward_linear(norm.out_act, o.out, /*accumulate=*/false, scratch, pool);
}

}  // namespace fp4moe
