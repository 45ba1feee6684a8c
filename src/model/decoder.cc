#include "model/decoder.h"

#include <string>
#include <utility>

#include "base/check.h"
#include "base/weight_store.h"
#include "model/lm_head.h"
#include "model/weight_loader.h"

namespace fp4moe {
namespace {

Status check_features(const FeatureOptions& features, const ModelConfig& config) {
  for (const int64_t layer : features.after_layers)
    if (layer < 0 || layer >= config.num_layers)
      return invalid_argument("features after layer " + std::to_string(layer) + "; legal: layers 0 to " +
                              std::to_string(config.num_layers - 1));
  return {};
}

class Decoder final : public Model {
 public:
  Decoder(const ModelConfig& config, const ModelOptions& options, const DenseOps& ops)
      : ops_(ops), stack_(config, options, ops) {}

  Status load(WeightLoader& loader, LayerLoader load_layer);

  const ModelConfig& config() const override { return stack_.config(); }
  int64_t weight_bytes() const override {
    return embedding_.num_bytes() + stack_.weight_bytes() + lm_head_.weight_bytes();
  }
  const ExpertCounters& expert_counters() const override { return stack_.expert_counters(); }
  Status forward_model(const Batch& batch, KvCache& kv, float* logits, ThreadPool& pool) override;
  Result<ExpertMoves> rebalance_experts() override { return stack_.rebalance_experts(); }
  std::shared_ptr<const ExpertPlacements> placements() const override { return stack_.placements(); }
  Features features() const override { return stack_.features(); }
  SharedWeights shared_weights() const override { return {embedding_.as<bf16>(), &lm_head_}; }

 private:
  const DenseOps& ops_;
  Buffer embedding_;  // [V, H] bf16
  LmHead lm_head_;
  LayerStack stack_;
};

Status Decoder::load(WeightLoader& loader, LayerLoader load_layer) {
  const int64_t h = config().hidden_size;
  FP4MOE_RETURN_IF_ERROR(check_features(stack_.options().features, config()));
  enter_weights_part("embedding");
  FP4MOE_ASSIGN_OR_RETURN(embedding_, loader.matrix("model.embed_tokens.weight", config().vocab_size, h));
  if (stack_.options().checks_only) embedding_ = Buffer();
  FP4MOE_RETURN_IF_ERROR(stack_.load_layers(loader, load_layer, {0, config().num_layers}));
  enter_weights_part("head");
  FP4MOE_ASSIGN_OR_RETURN(Buffer final_norm, loader.norm("model.norm.weight", h));
  FP4MOE_ASSIGN_OR_RETURN(
      lm_head_, LmHead::load(loader, config().tie_word_embeddings ? "model.embed_tokens" : "lm_head",
                             lm_head_options(config(), stack_.options())));
  return stack_.finish(loader.moe_plan(), std::move(final_norm), lm_head_);
}

Status Decoder::forward_model(const Batch& batch, KvCache& kv, float* logits, ThreadPool& pool) {
  const int64_t t = batch.num_rows(), most = stack_.options().max_batch_tokens;
  FP4MOE_CHECK(t <= most, std::to_string(t) + " rows; the limit is " + std::to_string(most));
  ops_.embed({embedding_.as<bf16>(), batch.op_token_ids(), stack_.input_rows(), t, config().hidden_size,
              batch.op_chosen()},
             pool);
  return stack_.forward_layers(batch, kv, logits, pool);
}

}  // namespace

Result<std::unique_ptr<Model>> load_decoder(const Checkpoint& checkpoint, const ModelConfig& config,
                                            const ModelOptions& options, LayerLoader load_layer,
                                            ThreadPool& pool, const ProgressSink& progress) {
  WeightLoader loader(checkpoint, config, options, pool, progress);
  auto model = std::make_unique<Decoder>(config, options, loader.ops());
  FP4MOE_RETURN_IF_ERROR(model->load(loader, load_layer));
  return std::unique_ptr<Model>(std::move(model));
}

LmHeadOptions lm_head_options(const ModelConfig& config, const ModelOptions& options) {
  const RankLayout& layout = options.rank.layout;
  return {
      .rank = options.rank,
      .whole_job = layout.dp > 1 && !options.dp_lm_head,
      .max_rows = options.max_logit_rows > 0 ? options.max_logit_rows : options.max_batch_tokens * layout.dp,
      .hidden_size = config.hidden_size,
      .vocab_size = config.vocab_size,
      .act_dtype = options.act_dtype,
  };
}

std::string layer_prefix(int64_t layer) { return "model.layers." + std::to_string(layer) + "."; }

Status load_norms(WeightLoader& loader, int64_t layer, DecoderLayer& out) {
  const std::string prefix = layer_prefix(layer);
  const int64_t h = loader.config().hidden_size;
  FP4MOE_ASSIGN_OR_RETURN(out.attention_norm, loader.norm(prefix + "input_layernorm.weight", h));
  FP4MOE_ASSIGN_OR_RETURN(out.ffn_norm, loader.norm(prefix + "post_attention_layernorm.weight", h));
  return {};
}

Result<LinearLayer> load_attention_out(WeightLoader& loader, const std::string& name, int64_t cols,
                                       bool has_bias) {
  const RankLayout& layout = loader.layout();
  const int64_t h = loader.config().hidden_size;
  const LinearShape shape = {h, cols * layout.attention_tp(), has_bias};
  if (loader.is_deterministic())
    return loader.row_shard(name, shape, output_shard(h, layout.attention_tp(), layout.attention_rank()));
  return loader.column_shard(name, shape, {cols * layout.attention_rank(), cols});
}

}  // namespace fp4moe
