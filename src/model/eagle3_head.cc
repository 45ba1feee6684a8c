#include "model/eagle3_head.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/weight_store.h"
#include "io/checkpoint/eagle3_tensors.h"
#include "model/decoder.h"
#include "model/layer_parts.h"
#include "model/weight_loader.h"

namespace fp4moe {
namespace {

constexpr int64_t kFeatureRowsPerPass = 256;  // mapped at a time, which bounds the memory

// Attention of the head's first layer, whose input is [norm(embedding) ; norm(h)], 2 H wide.
class JoinedAttention final : public Attention {
 public:
  struct Inputs {
    const float* embedded = nullptr;  // [T, H]
    Buffer hidden_norm;               // [H] f32; empty: the residual is already normed
    int64_t hidden_size = 0;
    DType act_dtype = DType::kBF16;
  };
  JoinedAttention(const DenseOps& ops, std::unique_ptr<Attention> attention, Inputs inputs)
      : ops_(ops), attention_(std::move(attention)), inputs_(std::move(inputs)) {}

  int64_t out_cols() const override { return attention_->out_cols(); }
  int64_t weight_bytes() const override { return attention_->weight_bytes(); }
  int64_t scratch_bytes(int64_t max_tokens) const override {
    return Arena::padded(joined_bytes(max_tokens)) + Arena::padded(max_tokens * inputs_.hidden_size * 4) +
           attention_->scratch_bytes(max_tokens);
  }

  // in.norm is the layer's first norm; its rows are the residual.
  void forward_attention(const AttentionInput& in, Arena& scratch, ThreadPool& pool) const override {
    const int64_t t = in.norm.out_act.rows;
    const ActRows joined = {scratch.take<uint8_t>(joined_bytes(t)), inputs_.act_dtype, t,
                            2 * inputs_.hidden_size};
    float* normed = scratch.take<float>(t * inputs_.hidden_size);
    RmsNormArgs norm = in.norm;
    norm.out_act.data = nullptr;
    norm.out_f32 = normed;
    norm.x = inputs_.embedded;
    ops_.rms_norm(norm, pool);
    put(normed, joined, 0, pool);
    if (inputs_.hidden_norm.num_bytes() > 0) {
      norm.x = in.norm.x;
      norm.weight = inputs_.hidden_norm.as<float>();
      ops_.rms_norm(norm, pool);
      put(normed, joined, inputs_.hidden_size, pool);
    } else {
      put(in.norm.x, joined, inputs_.hidden_size, pool);
    }
    const RmsNormArgs done{.out_act = joined, .is_done = true};
    attention_->forward_attention({in.batch, done, in.k_pages, in.v_pages, in.state, in.out}, scratch, pool);
  }

 private:
  int64_t joined_bytes(int64_t num_tokens) const {
    return num_tokens * 2 * inputs_.hidden_size * dtype_bits(inputs_.act_dtype) / 8;
  }
  // Converts x [T, H] to columns [first_col, first_col + H) of `joined`.
  void put(const float* x, const ActRows& joined, int64_t first_col, ThreadPool& pool) const {
    ops_.convert_rows(
        {.x = x,
         .x_stride = inputs_.hidden_size,
         .out = static_cast<uint8_t*>(joined.data) + first_col * dtype_bits(inputs_.act_dtype) / 8,
         .out_dtype = inputs_.act_dtype,
         .out_stride = joined.cols,
         .num_tokens = joined.rows,
         .n = inputs_.hidden_size},
        pool);
  }

  const DenseOps& ops_;
  const std::unique_ptr<Attention> attention_;
  const Inputs inputs_;
};

class Eagle3Head final : public Model {
 public:
  Eagle3Head(const Eagle3Config& config, const ModelOptions& options, const DenseOps& ops,
             const Model& target)
      : head_(config), ops_(ops), target_(&target), stack_(config.layers, options, ops) {}

  Status load(WeightLoader& loader);

  const ModelConfig& config() const override { return stack_.config(); }
  int64_t weight_bytes() const override {
    return embedding_.num_bytes() + fc_.weight_bytes() + stack_.weight_bytes() + lm_head_.weight_bytes();
  }
  const ExpertCounters& expert_counters() const override { return stack_.expert_counters(); }
  Status forward_model(const Batch& batch, KvCache& kv, float* logits, ThreadPool& pool) override;
  Features features() const override { return stack_.features(); }
  std::span<const int32_t> token_ids() const override { return token_ids_; }
  void set_target(const Model& target) override {
    target_ = &target;
    if (!has_lm_head_) stack_.set_lm_head(*target.shared_weights().lm_head);
  }

 private:
  Result<DecoderLayer> load_layer(WeightLoader& loader, int64_t layer);
  Status load_norms(WeightLoader& loader);
  Status allocate_inputs(WeightLoader& loader);
  void write_inputs(const Batch& batch, const Features& from, ThreadPool& pool);
  void map_features(const Batch& batch, const Features& from, ThreadPool& pool);
  int64_t act_bytes() const { return dtype_bits(stack_.options().act_dtype) / 8; }
  float norm_eps() const { return static_cast<float>(config().rms_norm_eps); }

  const Eagle3Config head_;
  const DenseOps& ops_;
  const Model* target_;
  std::vector<int32_t> token_ids_;  // [draft vocabulary] the target's ids, or empty
  Buffer embedding_;                // [V, H] bf16; empty: the target's
  Buffer input_norm_;               // [features] f32 with norm_before_fc
  std::vector<Buffer> fc_norms_;    // of each feature [target H] f32 with fc_norm
  LinearLayer fc_;                  // [H, features]; empty without has_fc()
  Buffer residual_norm_;            // hidden_norm [H] f32 with norm_before_residual
  LmHead lm_head_;                  // empty without has_lm_head_: the target's
  bool has_lm_head_ = false;
  LayerStack stack_;
  Arena inputs_;
  float* embedded_ = nullptr;  // [T, H]
  float* features_ = nullptr;  // [kFeatureRowsPerPass, features] f32
  void* rounded_ = nullptr;    // the same as act
  Arena scratch_;              // of fc
};

// ---- loading --------------------------------------------------------------------------------------

Status Eagle3Head::load(WeightLoader& loader) {
  const int64_t h = config().hidden_size;
  FP4MOE_ASSIGN_OR_RETURN(token_ids_, eagle3_token_ids(loader.checkpoint(), head_));
  enter_weights_part("embedding");
  if (const char* name = "model.embed_tokens.weight"; loader.checkpoint().find(name) != nullptr) {
    FP4MOE_ASSIGN_OR_RETURN(embedding_, loader.matrix(name, head_.target_vocab_size, h));
  }
  FP4MOE_RETURN_IF_ERROR(load_norms(loader));
  if (head_.has_fc()) {
    enter_weights_part("fc");
    FP4MOE_ASSIGN_OR_RETURN(fc_, loader.linear("fc", {h, head_.feature_width()}));
  }
  FP4MOE_RETURN_IF_ERROR(allocate_inputs(loader));
  FP4MOE_RETURN_IF_ERROR(stack_.load_layers(
      loader, [this](WeightLoader& from, int64_t layer) { return load_layer(from, layer); },
      {0, config().num_layers}));
  enter_weights_part("head");
  FP4MOE_ASSIGN_OR_RETURN(Buffer final_norm, loader.floats("model.norm.weight", h));
  has_lm_head_ = loader.checkpoint().find("lm_head.weight") != nullptr;
  if (has_lm_head_) {
    FP4MOE_ASSIGN_OR_RETURN(lm_head_,
                            LmHead::load(loader, "lm_head", lm_head_options(config(), stack_.options())));
  }
  return stack_.finish(loader.moe_plan(), std::move(final_norm),
                       has_lm_head_ ? lm_head_ : *target_->shared_weights().lm_head);
}

Status Eagle3Head::load_norms(WeightLoader& loader) {
  if (head_.norm_before_fc) {
    FP4MOE_ASSIGN_OR_RETURN(input_norm_, loader.floats("input_norm.weight", head_.feature_width()));
  }
  for (int64_t i = 0; head_.fc_norm && i < head_.num_features(); ++i) {
    FP4MOE_ASSIGN_OR_RETURN(
        Buffer norm, loader.floats("fc_norm." + std::to_string(i) + ".weight", head_.target_hidden_size));
    fc_norms_.push_back(std::move(norm));
  }
  return {};
}

Result<DecoderLayer> Eagle3Head::load_layer(WeightLoader& loader, int64_t layer) {
  const int64_t h = config().hidden_size;
  if (layer > 0) return load_gqa_layer(loader, {.layer = layer}, {});
  FP4MOE_ASSIGN_OR_RETURN(DecoderLayer first,
                          load_gqa_layer(loader, {.layer = layer, .input_cols = 2 * h}, {}));
  FP4MOE_ASSIGN_OR_RETURN(Buffer hidden_norm, loader.floats(layer_prefix(layer) + "hidden_norm.weight", h));
  JoinedAttention::Inputs inputs{
      .embedded = embedded_, .hidden_norm = {}, .hidden_size = h, .act_dtype = stack_.options().act_dtype};
  (head_.norm_before_residual ? residual_norm_ : inputs.hidden_norm) = std::move(hidden_norm);
  first.attention = std::make_unique<JoinedAttention>(ops_, std::move(first.attention), std::move(inputs));
  return first;
}

Status Eagle3Head::allocate_inputs(WeightLoader& loader) {
  const int64_t embedded = stack_.options().max_batch_tokens * config().hidden_size;
  const int64_t rows = std::min(kFeatureRowsPerPass, stack_.options().max_batch_tokens);
  const int64_t features = head_.has_fc() ? rows * head_.feature_width() : 0;
  FP4MOE_ASSIGN_OR_RETURN(inputs_, Arena::make(Arena::padded(embedded * 4) + Arena::padded(features * 4) +
                                                   Arena::padded(features * act_bytes()),
                                               loader.ops().memory()));
  embedded_ = inputs_.take<float>(embedded);
  features_ = inputs_.take<float>(features);
  rounded_ = inputs_.take<uint8_t>(features * act_bytes());
  FP4MOE_ASSIGN_OR_RETURN(scratch_, Arena::make(fc_.scratch_bytes(rows), loader.ops().memory()));
  return {};
}

// ---- forward --------------------------------------------------------------------------------------

Status Eagle3Head::forward_model(const Batch& batch, KvCache& kv, float* logits, ThreadPool& pool) {
  const int64_t t = batch.num_rows(), most = stack_.options().max_batch_tokens;
  FP4MOE_CHECK(t <= most, std::to_string(t) + " rows; the limit is " + std::to_string(most));
  if (t > 0) {
    const Features from = batch.chains ? stack_.features() : target_->features();
    check_feature_rows(batch, from, batch.chains ? config().hidden_size : head_.feature_width());
    write_inputs(batch, from, pool);
  }
  return stack_.forward_layers(batch, kv, logits, pool);
}

// Writes the rows' embeddings and the residual before the first layer.
void Eagle3Head::write_inputs(const Batch& batch, const Features& from, ThreadPool& pool) {
  const int64_t t = batch.num_rows(), h = config().hidden_size;
  const bf16* table =
      embedding_.num_bytes() > 0 ? embedding_.as<bf16>() : target_->shared_weights().embedding;
  ops_.embed({table, batch.op_token_ids(), embedded_, t, h, batch.op_chosen()}, pool);
  float* rows = stack_.input_rows();
  if (batch.chains || !head_.has_fc())
    ops_.gather_rows({from.data, rows, batch.op_feature_rows(), t, h * int64_t{sizeof(float)}}, pool);
  else
    map_features(batch, from, pool);
  if (head_.norm_before_residual)
    ops_.rms_norm({.x = rows,
                   .weight = residual_norm_.as<float>(),
                   .eps = norm_eps(),
                   .out_act = {nullptr, stack_.options().act_dtype, t, h},
                   .out_f32 = rows},
                  pool);
}

// Writes fc of the features' rows.
void Eagle3Head::map_features(const Batch& batch, const Features& from, ThreadPool& pool) {
  const int64_t t = batch.num_rows(), width = head_.feature_width(), part = head_.target_hidden_size;
  for (int64_t first = 0; first < t; first += kFeatureRowsPerPass) {
    const int64_t n = std::min(kFeatureRowsPerPass, t - first);
    const ActRows x = {rounded_, stack_.options().act_dtype, n, width};
    float* out = stack_.input_rows() + first * config().hidden_size;
    scratch_.reset();
    ops_.gather_rows(
        {from.data, features_, batch.op_feature_rows() + first, n, width * int64_t{sizeof(float)}}, pool);
    for (size_t i = 0; i < fc_norms_.size(); ++i)
      ops_.head_norm({features_ + static_cast<int64_t>(i) * part, fc_norms_[i].as<float>(), norm_eps(), n,
                      width, 1, static_cast<int>(part)},
                     pool);
    if (head_.norm_before_fc) {
      fc_.forward_normed({.x = features_, .weight = input_norm_.as<float>(), .eps = norm_eps(), .out_act = x},
                         out, scratch_, pool);
      continue;
    }
    ops_.convert_rows({features_, width, x.data, x.dtype, width, n, width}, pool);
    fc_.forward_linear(x, out, /*accumulate=*/false, scratch_, pool);
  }
}

}  // namespace

FeatureOptions eagle3_features(const Eagle3Config& config) {
  return {.is_final_norm = config.after_layers.empty(), .after_layers = config.after_layers};
}

Result<std::unique_ptr<Model>> load_eagle3_head(const Checkpoint& checkpoint, const Eagle3Config& config,
                                                const ModelOptions& options, const Model& target,
                                                ThreadPool& pool, const ProgressSink& progress) {
  FP4MOE_ASSIGN_OR_RETURN(const Checkpoint tensors, eagle3_tensors(checkpoint, config));
  ModelOptions head = options;
  head.features = {.is_final_norm = config.norm_output, .after_layers = {}};
  if (!config.norm_output) head.features.after_layers = {config.layers.num_layers - 1};
  WeightLoader loader(tensors, config.layers, head, pool, progress);
  auto model = std::make_unique<Eagle3Head>(config, head, loader.ops(), target);
  FP4MOE_RETURN_IF_ERROR(model->load(loader));
  return std::unique_ptr<Model>(std::move(model));
}

}  // namespace fp4moe
