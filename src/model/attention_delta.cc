// The gated delta net: input projections, and the op between them and the output projection.
#include "kernels/gated_delta.h"

#include <cmath>
#include <string>
#include <vector>

#include "base/check.h"
#include "formats/fp8_matrix.h"
#include "io/checkpoint/finite_check.h"
#include "model/attention.h"
#include "model/state_cache.h"
#include "model/weight_loader.h"

namespace fp4moe {
namespace {

static_assert(DeltaConfig::kMaxHeadDim == kMaxDeltaHeadDim && DeltaConfig::kMaxConvWidth == kMaxConvWidth);

struct DeltaWeights {
  // Together [C + Hv dv + 2 Hv, H]: the rows of qkv, z, b and a, in this order. Matrices in one format are
  // one layer.
  std::vector<LinearLayer> inputs;
  Buffer conv;            // [C, conv_width] f32
  Buffer decay, dt_bias;  // [Hv] f32
  Buffer norm;            // [dv] f32
  DeltaConfig sizes;      // of this rank's heads
  float norm_eps = 0;
};

// The input projections' outputs.
class DeltaInputs {
 public:
  void add(const float* out, int64_t num_cols) { layers_.push_back({out, num_cols}); }
  struct Column {
    const float* at;
    int64_t stride;
  };
  // The column of all layers together.
  Column column(int64_t index) const {
    size_t layer = 0;
    while (index >= layers_[layer].stride) index -= layers_[layer++].stride;
    return {layers_[layer].at + index, layers_[layer].stride};
  }

 private:
  std::vector<Column> layers_;
};

class GatedDelta final : public Attention {
 public:
  GatedDelta(const DenseOps& ops, DeltaWeights weights) : ops_(ops), w_(std::move(weights)) {}

  int64_t out_cols() const override { return w_.sizes.num_value_heads * w_.sizes.value_head_dim; }
  WeightBytes first_weights() const override { return w_.inputs.front().bytes(); }
  int64_t weight_bytes() const override {
    int64_t sum = 0;
    for (const LinearLayer& layer : w_.inputs) sum += layer.weight_bytes();
    return sum;
  }
  int64_t scratch_bytes(int64_t max_tokens) const override {
    int64_t outputs = 0, most = workspace_bytes(shape(), max_tokens);
    for (const LinearLayer& layer : w_.inputs) {
      outputs += Arena::padded(max_tokens * layer.n() * int64_t{sizeof(float)});
      most = std::max(most, layer.scratch_bytes(max_tokens));
    }
    return outputs + most;
  }

  void forward_attention(const AttentionInput& in, Arena& scratch, ThreadPool& pool) const override {
    const DeltaInputs inputs = project(in.norm, scratch, pool);
    const int64_t channels = w_.sizes.conv_channels();
    const DeltaInputs::Column qkv = inputs.column(0), z = inputs.column(channels),
                              b = inputs.column(channels + out_cols()),
                              a = inputs.column(channels + out_cols() + w_.sizes.num_value_heads);
    GatedDeltaArgs args = shape();
    args.qkv = qkv.at;
    args.qkv_stride = qkv.stride;
    args.z = z.at;
    args.z_stride = z.stride;
    args.b = b.at;
    args.a = a.at;
    args.ba_stride = b.stride;
    args.slots = in.state;
    args.sequences = in.batch.sequences;
    args.device_batch = in.batch.device;
    args.out = in.out;
    args.workspace = scratch.take<uint8_t>(workspace_bytes(args, in.out.rows));
    ops_.gated_delta(args, pool);
  }

 private:
  // The arguments that do not depend on the batch.
  GatedDeltaArgs shape() const {
    GatedDeltaArgs args;
    args.conv_weight = w_.conv.as<float>();
    args.decay = w_.decay.as<float>();
    args.dt_bias = w_.dt_bias.as<float>();
    args.norm_weight = w_.norm.as<float>();
    args.eps = w_.norm_eps;
    args.num_key_heads = static_cast<int>(w_.sizes.num_key_heads);
    args.num_value_heads = static_cast<int>(w_.sizes.num_value_heads);
    args.key_head_dim = static_cast<int>(w_.sizes.key_head_dim);
    args.value_head_dim = static_cast<int>(w_.sizes.value_head_dim);
    args.conv_width = static_cast<int>(w_.sizes.conv_width);
    return args;
  }

  int64_t workspace_bytes(const GatedDeltaArgs& args, int64_t max_tokens) const {
    return ops_.gated_delta_workspace_bytes == nullptr
               ? 0
               : Arena::padded(ops_.gated_delta_workspace_bytes(args, max_tokens));
  }

  DeltaInputs project(const RmsNormArgs& norm, Arena& scratch, ThreadPool& pool) const {
    DeltaInputs inputs;
    std::vector<LinearLayer::Output> outputs;
    for (const LinearLayer& layer : w_.inputs) {
      outputs.push_back({&layer, scratch.take<float>(norm.out_act.rows * layer.n())});
      inputs.add(outputs.back().out, layer.n());
    }
    LinearLayer::forward_all_normed(norm, outputs, scratch, pool);
    return inputs;
  }

  const DenseOps& ops_;
  const DeltaWeights w_;
};

// Where a matrix has the rows of key head h, or of its value heads: [first + h * stride, + count).
struct HeadRows {
  int64_t first, stride, count;
};

std::vector<int64_t> rows_of_heads(std::initializer_list<HeadRows> parts, Shard key_heads) {
  std::vector<int64_t> rows;
  for (const HeadRows& part : parts)
    for (int64_t head = key_heads.first; head < key_heads.first + key_heads.count; ++head)
      for (int64_t i = 0; i < part.count; ++i) rows.push_back(part.first + head * part.stride + i);
  return rows;
}

// The tensors of one layer. This rank has the rows of `key_heads` and their value heads.
struct DeltaTensors {
  WeightLoader& loader;
  const std::string& prefix;
  const DeltaConfig& delta;
  Shard key_heads;

  int64_t value_heads() const { return delta.num_value_heads / delta.num_key_heads; }  // per key head
  // Rows in the order all q heads, all k heads, all v heads.
  std::vector<int64_t> conv_rows() const {
    const int64_t dk = delta.key_head_dim, dv = value_heads() * delta.value_head_dim,
                  keys = delta.num_key_heads * dk;
    return rows_of_heads({{0, dk, dk}, {keys, dk, dk}, {2 * keys, dv, dv}}, key_heads);
  }

  Result<LinearPart> part(const char* name, int64_t num_rows, std::vector<int64_t> rows) const {
    FP4MOE_ASSIGN_OR_RETURN(const LinearWeightsView view,
                            loader.view(prefix + name, {num_rows, loader.config().hidden_size}));
    return LinearPart{view, std::move(rows), {}};
  }
  // The rows of qkv and z, then those of b and a.
  Result<std::vector<std::vector<LinearPart>>> parts() const {
    const int64_t n = value_heads(), dk = delta.key_head_dim, dv = n * delta.value_head_dim,
                  all_v = delta.num_value_heads * delta.value_head_dim, all_h = delta.num_value_heads;
    if (delta.has_grouped_inputs) {
      const int64_t group = 2 * (dk + dv);
      FP4MOE_ASSIGN_OR_RETURN(
          LinearPart qkvz,
          part("in_proj_qkvz", delta.num_key_heads * group,
               rows_of_heads({{0, group, dk}, {dk, group, dk}, {2 * dk, group, dv}, {2 * dk + dv, group, dv}},
                             key_heads)));
      FP4MOE_ASSIGN_OR_RETURN(LinearPart ba, part("in_proj_ba", 2 * all_h,
                                                  rows_of_heads({{0, 2 * n, n}, {n, 2 * n, n}}, key_heads)));
      return std::vector<std::vector<LinearPart>>{{std::move(qkvz)}, {std::move(ba)}};
    }
    const std::vector<int64_t> of_heads = rows_of_heads({{0, n, n}}, key_heads);
    FP4MOE_ASSIGN_OR_RETURN(LinearPart qkv, part("in_proj_qkv", delta.conv_channels(), conv_rows()));
    FP4MOE_ASSIGN_OR_RETURN(LinearPart z, part("in_proj_z", all_v, rows_of_heads({{0, dv, dv}}, key_heads)));
    FP4MOE_ASSIGN_OR_RETURN(LinearPart b, part("in_proj_b", all_h, of_heads));
    FP4MOE_ASSIGN_OR_RETURN(LinearPart a, part("in_proj_a", all_h, of_heads));
    return std::vector<std::vector<LinearPart>>{{std::move(qkv), std::move(z)}, {std::move(b), std::move(a)}};
  }
};

Status load_inputs(const DeltaTensors& tensors, std::vector<LinearLayer>& inputs) {
  FP4MOE_ASSIGN_OR_RETURN(const std::vector<std::vector<LinearPart>> pairs, tensors.parts());
  const auto add = [&](const std::vector<LinearPart>& parts) -> Status {
    FP4MOE_ASSIGN_OR_RETURN(LinearLayer layer, tensors.loader.linear(parts));
    inputs.push_back(std::move(layer));
    return {};
  };
  std::vector<LinearPart> all = pairs[0];
  all.insert(all.end(), pairs[1].begin(), pairs[1].end());
  if (can_stack(all)) return add(all);
  for (const std::vector<LinearPart>& pair : pairs) {
    if (can_stack(pair)) {
      FP4MOE_RETURN_IF_ERROR(add(pair));
      continue;
    }
    for (const LinearPart& part : pair) FP4MOE_RETURN_IF_ERROR(add({part}));
  }
  return {};
}

// Loads the taps [C, conv_width] of all channels.
Result<std::vector<float>> load_taps(const DeltaTensors& tensors) {
  const int64_t channels = tensors.delta.conv_channels(), width = tensors.delta.conv_width;
  const std::string name = tensors.prefix + "conv1d";
  const TensorEntry* entry = tensors.loader.checkpoint().find(name + ".weight");
  if (entry == nullptr || entry->view.dtype != DType::kF8E4M3)
    return tensors.loader.values(name + ".weight", {channels, 1, width});
  FP4MOE_ASSIGN_OR_RETURN(const LinearWeightsView view, tensors.loader.view(name, {channels, width}));
  FP4MOE_RETURN_IF_ERROR(check_finite({entry}, tensors.loader.pool()));
  std::vector<float> taps(static_cast<size_t>(channels * width));
  for (int64_t row = 0; row < channels; ++row)
    fp8_dequantize_row(view.fp8, width, row, taps.data() + row * width);
  tensors.loader.count(entry->view.num_bytes());
  return taps;
}

Status load_conv(const DeltaTensors& tensors, Buffer& conv) {
  const int64_t width = tensors.delta.conv_width;
  FP4MOE_ASSIGN_OR_RETURN(const std::vector<float> all, load_taps(tensors));
  std::vector<float> own;
  for (const int64_t row : tensors.conv_rows()) {
    const auto taps = all.begin() + row * width;
    own.insert(own.end(), taps, taps + width);
  }
  FP4MOE_ASSIGN_OR_RETURN(conv, tensors.loader.put(own));
  return {};
}

// Loads the values of this rank's value heads from a vector [Hv].
Result<std::vector<float>> load_of_heads(const DeltaTensors& tensors, const char* name) {
  FP4MOE_ASSIGN_OR_RETURN(const std::vector<float> all,
                          tensors.loader.vector(tensors.prefix + name, tensors.delta.num_value_heads));
  const int64_t first = tensors.key_heads.first * tensors.value_heads();
  return std::vector<float>(all.begin() + first,
                            all.begin() + first + tensors.key_heads.count * tensors.value_heads());
}

}  // namespace

Result<std::unique_ptr<Attention>> load_gated_delta(WeightLoader& loader, const std::string& prefix) {
  const DeltaConfig& delta = loader.config().delta;
  const DeltaTensors tensors{loader, prefix, delta, key_head_shard(delta, loader.layout())};
  DeltaWeights w;
  w.sizes = delta;
  w.sizes.num_key_heads = tensors.key_heads.count;
  w.sizes.num_value_heads = tensors.key_heads.count * tensors.value_heads();
  w.norm_eps = static_cast<float>(loader.config().rms_norm_eps);
  FP4MOE_RETURN_IF_ERROR(load_inputs(tensors, w.inputs));
  FP4MOE_RETURN_IF_ERROR(load_conv(tensors, w.conv));
  FP4MOE_ASSIGN_OR_RETURN(std::vector<float> decay, load_of_heads(tensors, "A_log"));
  for (float& value : decay) value = -std::exp(value);
  FP4MOE_ASSIGN_OR_RETURN(w.decay, loader.put(decay));
  FP4MOE_ASSIGN_OR_RETURN(const std::vector<float> dt_bias, load_of_heads(tensors, "dt_bias"));
  FP4MOE_ASSIGN_OR_RETURN(w.dt_bias, loader.put(dt_bias));
  FP4MOE_ASSIGN_OR_RETURN(w.norm, loader.floats(prefix + "norm.weight", delta.value_head_dim));
  return std::unique_ptr<Attention>(std::make_unique<GatedDelta>(loader.ops(), std::move(w)));
}

}  // namespace fp4moe
