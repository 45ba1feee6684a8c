#include "model/mtp_head.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "io/checkpoint/expert_weights.h"
#include "io/config/quant_config.h"
#include "io/config/tensor_names.h"
#include "model/families.h"
#include "model/weight_loader.h"

namespace fp4moe {
namespace {

constexpr const char* kNearest = "; nearest legal choice: --speculative-algorithm NGRAM";

class MtpHead final : public Model {
 public:
  MtpHead(const ModelOptions& options, const DenseOps& ops, const Model& target)
      : ops_(ops), target_(target), stack_(mtp_config(target.config()), options, ops) {}

  // `layer`: the MTP layer's number in the checkpoint.
  Status load(WeightLoader& loader, LayerLoader load_layer, int64_t layer);

  const ModelConfig& config() const override { return stack_.config(); }
  int64_t weight_bytes() const override {
    return embedding_proj_.weight_bytes() + hidden_proj_.weight_bytes() + stack_.weight_bytes();
  }
  const ExpertCounters& expert_counters() const override { return stack_.expert_counters(); }
  Status forward_model(const Batch& batch, KvCache& kv, float* logits, ThreadPool& pool) override;
  Features features() const override { return stack_.features(); }

 private:
  Status load_projections(WeightLoader& loader, const std::string& prefix);
  Status allocate_inputs();
  void write_inputs(const Batch& batch, const Features& from, ThreadPool& pool);
  RmsNormArgs input_norm(const Buffer& weight, int64_t num_rows) const;

  const DenseOps& ops_;
  const Model& target_;
  Buffer embedding_norm_, hidden_norm_;  // enorm, hnorm: [H] f32
  // The columns of eh_proj [H, 2 H] for the embedding and for the hidden state. Every rank has all of them.
  LinearLayer embedding_proj_, hidden_proj_;
  LayerStack stack_;
  Arena inputs_;
  float* input_ = nullptr;  // [T, H]: embeddings, then hidden states
  void* normed_ = nullptr;  // [T, H] act
  Arena scratch_;           // of the projections
};

Status MtpHead::load(WeightLoader& loader, LayerLoader load_layer, int64_t layer) {
  const std::string prefix = layer_prefix(layer);
  FP4MOE_RETURN_IF_ERROR(stack_.load_layers(loader, load_layer, {layer, 1}));
  FP4MOE_RETURN_IF_ERROR(load_projections(loader, prefix));
  FP4MOE_ASSIGN_OR_RETURN(Buffer final_norm,
                          loader.norm(prefix + "shared_head.norm.weight", config().hidden_size));
  FP4MOE_RETURN_IF_ERROR(
      stack_.finish(loader.moe_plan(), std::move(final_norm), *target_.shared_weights().lm_head));
  return allocate_inputs();
}

Status MtpHead::load_projections(WeightLoader& loader, const std::string& prefix) {
  const int64_t h = config().hidden_size;
  FP4MOE_ASSIGN_OR_RETURN(embedding_norm_, loader.norm(prefix + "enorm.weight", h));
  FP4MOE_ASSIGN_OR_RETURN(hidden_norm_, loader.norm(prefix + "hnorm.weight", h));
  FP4MOE_ASSIGN_OR_RETURN(const LinearWeightsView both, loader.view(prefix + "eh_proj", {h, 2 * h}));
  FP4MOE_ASSIGN_OR_RETURN(embedding_proj_, loader.linear({LinearPart{both, {}, {0, h}}}));
  FP4MOE_ASSIGN_OR_RETURN(hidden_proj_, loader.linear({LinearPart{both, {}, {h, h}}}));
  return {};
}

Status MtpHead::allocate_inputs() {
  const ModelOptions& options = stack_.options();
  const int64_t t = options.max_batch_tokens, values = t * config().hidden_size;
  const int64_t act_bytes = values * dtype_bits(options.act_dtype) / 8;
  FP4MOE_ASSIGN_OR_RETURN(inputs_,
                          Arena::make(Arena::padded(values * 4) + Arena::padded(act_bytes), ops_.memory()));
  input_ = inputs_.take<float>(values);
  normed_ = inputs_.take<uint8_t>(act_bytes);
  FP4MOE_ASSIGN_OR_RETURN(
      scratch_,
      Arena::make(std::max(embedding_proj_.scratch_bytes(t), hidden_proj_.scratch_bytes(t)), ops_.memory()));
  return {};
}

Status MtpHead::forward_model(const Batch& batch, KvCache& kv, float* logits, ThreadPool& pool) {
  const int64_t t = batch.num_rows(), most = stack_.options().max_batch_tokens;
  FP4MOE_CHECK(t <= most, std::to_string(t) + " rows; the limit is " + std::to_string(most));
  const Features from = batch.chains ? stack_.features() : target_.features();
  check_feature_rows(batch, from, config().hidden_size);
  if (t > 0) write_inputs(batch, from, pool);
  return stack_.forward_layers(batch, kv, logits, pool);
}

// Writes the rows' residual before the layer.
void MtpHead::write_inputs(const Batch& batch, const Features& from, ThreadPool& pool) {
  const int64_t t = batch.num_rows(), h = config().hidden_size;
  scratch_.reset();
  ops_.embed({target_.shared_weights().embedding, batch.op_token_ids(), input_, t, h, batch.op_chosen()},
             pool);
  embedding_proj_.forward_normed(input_norm(embedding_norm_, t), stack_.input_rows(), scratch_, pool);
  ops_.gather_rows({from.data, input_, batch.op_feature_rows(), t, h * int64_t{sizeof(float)}}, pool);
  const RmsNormArgs norm = input_norm(hidden_norm_, t);
  run_norm(ops_, norm, pool);
  hidden_proj_.forward_linear(norm.out_act, stack_.input_rows(), /*accumulate=*/true, scratch_, pool);
}

RmsNormArgs MtpHead::input_norm(const Buffer& weight, int64_t num_rows) const {
  return {.x = input_,
          .weight = weight.as<float>(),
          .eps = static_cast<float>(config().rms_norm_eps),
          .out_act = {normed_, stack_.options().act_dtype, num_rows, config().hidden_size}};
}

// The plan was made from the declaration, the weights' format is that of the tensors.
Status check_expert_format(const Checkpoint& checkpoint, const ModelConfig& layers, const MoePlan& plan) {
  const Fp4Format planned = plan.problem().format;
  const Fp4Format stored = stored_expert_format(checkpoint, layers, layers.num_layers - 1);
  if (stored == planned) return {};
  return unsupported("'" + checkpoint.folder() + "': the experts of '" + layer_prefix(layers.num_layers - 1) +
                     "' are in " + fp4_format_name(stored) + ", but " + layers.quant.declared_by +
                     " declares " + fp4_format_name(planned));
}

}  // namespace

ModelConfig mtp_config(const ModelConfig& target) {
  ModelConfig config = target;
  config.num_layers = 1;
  config.layer_has_experts = {true};
  config.layer_windows = {0};
  config.layer_has_state.clear();
  config.num_mtp_layers = 0;
  return config;
}

Result<bool> has_bf16_mtp_experts(const ModelConfig& target, const std::string& folder) {
  if (target.quant.method == QuantMethod::kNone) return true;
  if (!folder.empty() && Checkpoint::has_weights(folder)) {
    FP4MOE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::open(folder));
    return stored_expert_format(checkpoint, target, target.num_layers) == Fp4Format::kNone;
  }
  return is_excluded(target.quant, layer_prefix(target.num_layers) + "mlp.experts.0.gate_proj");
}

Status check_mtp_layer(const ModelConfig& target) {
  if (target.may_have_mtp_layer) return {};
  const char* const key = target.mtp_layer >= 0 ? "mtp_num_hidden_layers = " : "num_nextn_predict_layers = ";
  const std::string declared = key + std::to_string(target.num_mtp_layers);
  if (target.num_mtp_layers == 0)
    return unsupported("the model (" + target.model_type +
                       ") has no layer for multi-token prediction: config.json has " + declared + kNearest);
  if (target.num_mtp_layers > 1)
    return unsupported("config.json: " + declared + " layers for multi-token prediction; supported: 1" +
                       kNearest);
  return {};
}

Status check_mtp_layer(const Checkpoint& checkpoint, const ModelConfig& target) {
  FP4MOE_RETURN_IF_ERROR(check_mtp_layer(target));
  const std::string joint = layer_prefix(target.num_layers) + "eh_proj";
  for (const char* suffix : {".weight", ".weight_packed"})
    if (checkpoint.find(joint + suffix) != nullptr) return {};
  return unsupported("'" + checkpoint.folder() + "' has no tensor '" +
                     stored_name(target.text_prefix, joint, target.mtp_layer) +
                     ".weight' of a layer for multi-token prediction" + kNearest);
}

Result<std::unique_ptr<Model>> load_mtp_head(const Checkpoint& checkpoint, const ModelOptions& options,
                                             const Model& target, ThreadPool& pool,
                                             const ProgressSink& progress) {
  const ModelConfig& config = target.config();
  FP4MOE_RETURN_IF_ERROR(check_mtp_layer(checkpoint, config));
  const int64_t layer = config.num_layers;
  ModelConfig layers = config;  // up to the MTP layer
  ++layers.num_layers;
  if (!layers.layer_has_experts.empty()) layers.layer_has_experts.push_back(true);
  if (!layers.layer_has_state.empty()) layers.layer_has_state.push_back(false);
  layers.layer_windows.push_back(0);
  FP4MOE_RETURN_IF_ERROR(check_expert_format(checkpoint, layers, options.moe_plan));
  ModelOptions mtp = options;
  mtp.features = {.is_final_norm = true, .after_layers = {}};
  WeightLoader loader(checkpoint, layers, mtp, pool, progress);
  auto model = std::make_unique<MtpHead>(mtp, loader.ops(), target);
  FP4MOE_RETURN_IF_ERROR(model->load(loader, layer_loader(config.family), layer));
  return std::unique_ptr<Model>(std::move(model));
}

}  // namespace fp4moe
