#include "model/gpt_oss.h"

#include <cmath>
#include <cstring>
#include <string>

#include "base/check.h"
#include "io/expert_weights.h"
#include "model/rope_table.h"
#include "model/weight_loader.h"
#include "moe/moe_layer.h"

namespace fp4moe {
namespace {

struct LayerWeights {
  std::vector<float> attention_norm;  // [H]
  LinearWeights qkv;                  // [(num_heads + 2 num_kv_heads) head_dim, H]: q, k, v rows
  std::vector<float> sinks;           // [num_heads]
  LinearWeights attention_out;        // [H, num_heads head_dim]
  std::vector<float> moe_norm;        // [H]
  std::unique_ptr<MoeLayer> moe;
  int64_t window = 0;
};

// Buffers of one forward pass, allocated at load for max_batch_tokens rows.
struct Activations {
  float* residual;    // [T, H]
  float* normed_f32;  // [T, H]: the router's input
  void* normed;       // [T, H] act: GEMM input
  float* qkv;         // [T, qkv.n]
  void* attention;    // [T, num_heads head_dim] act
};

class GptOss final : public Model {
 public:
  GptOss(const ModelConfig& config, const ModelOptions& options)
      : config_(config),
        options_(options),
        ops_(options.act_dtype == DType::kF32 ? ref_dense_ops() : cpu_dense_ops(options.isa)),
        rope_(make_rope_table(config.rope, config.head_dim)) {}

  Status load(const Checkpoint& checkpoint, ThreadPool& pool, const ProgressSink& progress);

  const ModelConfig& config() const override { return config_; }
  int64_t weight_bytes() const override { return weight_bytes_; }
  Status forward(const Batch& batch, KvCache& kv, float* logits, ThreadPool& pool) override;

 private:
  Status load_layer(const Checkpoint& checkpoint, WeightLoader& loader, int64_t layer, ThreadPool& pool);
  Status allocate_scratch();
  void attention(const LayerWeights& w, const Batch& batch, KvPages k_pages, KvPages v_pages,
                 ThreadPool& pool);
  void attention_output(const LayerWeights& w, int64_t num_rows, ThreadPool& pool);
  Status moe(int64_t layer, int64_t num_rows, ThreadPool& pool);
  void keep_logit_rows(const Batch& batch);

  ActRows act(void* data, int64_t rows, int64_t cols) const { return {data, options_.act_dtype, rows, cols}; }
  int64_t head_cols(int64_t heads) const { return heads * config_.head_dim; }

  const ModelConfig config_;
  const ModelOptions options_;
  const DenseOps& ops_;
  const RopeTable rope_;
  Buffer embedding_;               // [V, H] bf16
  LinearWeights lm_head_;          // [V, H]
  std::vector<float> final_norm_;  // [H]
  std::vector<LayerWeights> layers_;
  int64_t weight_bytes_ = 0;
  Activations act_{};
  std::unique_ptr<Transport> transport_;
  Arena activations_, moe_scratch_;
};

// ---- loading --------------------------------------------------------------------------------------

Status GptOss::load(const Checkpoint& checkpoint, ThreadPool& pool, const ProgressSink& progress) {
  WeightLoader loader(checkpoint, ops_.linear_layout, pool, progress);
  const int64_t h = config_.hidden_size;
  FP4MOE_ASSIGN_OR_RETURN(embedding_, loader.matrix("model.embed_tokens.weight", config_.vocab_size, h));
  for (int64_t layer = 0; layer < config_.num_layers; ++layer)
    FP4MOE_RETURN_IF_ERROR(load_layer(checkpoint, loader, layer, pool));
  FP4MOE_ASSIGN_OR_RETURN(final_norm_, loader.vector("model.norm.weight", h));
  const char* head = config_.tie_word_embeddings ? "model.embed_tokens" : "lm_head";
  FP4MOE_ASSIGN_OR_RETURN(lm_head_, loader.linear({head}, {config_.vocab_size}, h, false));
  weight_bytes_ += embedding_.num_bytes() + lm_head_.weight.num_bytes();
  return allocate_scratch();
}

Status GptOss::load_layer(const Checkpoint& checkpoint, WeightLoader& loader, int64_t layer,
                          ThreadPool& pool) {
  const int64_t h = config_.hidden_size;
  const int64_t q_cols = head_cols(config_.num_heads), kv_cols = head_cols(config_.num_kv_heads);
  const std::string prefix = "model.layers." + std::to_string(layer) + ".";
  const std::string attn = prefix + "self_attn.";
  const bool bias = config_.attention_bias;
  LayerWeights w;
  w.window = config_.layer_windows[static_cast<size_t>(layer)];
  FP4MOE_ASSIGN_OR_RETURN(w.attention_norm, loader.vector(prefix + "input_layernorm.weight", h));
  FP4MOE_ASSIGN_OR_RETURN(w.qkv, loader.linear({attn + "q_proj", attn + "k_proj", attn + "v_proj"},
                                               {q_cols, kv_cols, kv_cols}, h, bias));
  FP4MOE_ASSIGN_OR_RETURN(w.sinks, loader.vector(attn + "sinks", config_.num_heads));
  FP4MOE_ASSIGN_OR_RETURN(w.attention_out, loader.linear({attn + "o_proj"}, {h}, q_cols, bias));
  FP4MOE_ASSIGN_OR_RETURN(w.moe_norm, loader.vector(prefix + "post_attention_layernorm.weight", h));

  FP4MOE_ASSIGN_OR_RETURN(const TensorView router, checkpoint.get(prefix + "mlp.router.weight", DType::kBF16,
                                                                  {config_.num_experts, h}));
  RouterWeights router_weights{.scoring = RouterScoring::kTopkSoftmax, .weight = router.as<bf16>()};
  FP4MOE_ASSIGN_OR_RETURN(router_weights.bias,
                          loader.vector(prefix + "mlp.router.bias", config_.num_experts));
  FP4MOE_ASSIGN_OR_RETURN(const MoeWeightsView experts, load_expert_weights(checkpoint, config_, layer));
  FP4MOE_ASSIGN_OR_RETURN(w.moe,
                          MoeLayer::make(options_.moe_plan, ops_, router_weights, experts, nullptr, pool));
  loader.count(w.moe->weight_bytes());
  weight_bytes_ += w.qkv.weight.num_bytes() + w.attention_out.weight.num_bytes() + w.moe->weight_bytes();
  layers_.push_back(std::move(w));
  return {};
}

Status GptOss::allocate_scratch() {
  const int64_t t = options_.max_batch_tokens, h = config_.hidden_size;
  const int64_t act_bytes = dtype_bits(options_.act_dtype) / 8;
  const int64_t q_cols = head_cols(config_.num_heads), qkv_cols = layers_[0].qkv.n;
  const int64_t total = 2 * Arena::padded(t * h * 4) + Arena::padded(t * h * act_bytes) +
                        Arena::padded(t * qkv_cols * 4) + Arena::padded(t * q_cols * act_bytes);
  FP4MOE_ASSIGN_OR_RETURN(activations_, Arena::make(total));
  act_.residual = activations_.take<float>(t * h);
  act_.normed_f32 = activations_.take<float>(t * h);
  act_.normed = activations_.take<uint8_t>(t * h * act_bytes);
  act_.qkv = activations_.take<float>(t * qkv_cols);
  act_.attention = activations_.take<uint8_t>(t * q_cols * act_bytes);
  FP4MOE_ASSIGN_OR_RETURN(transport_, make_transport(options_.moe_plan, {.max_group_rows = t}));
  FP4MOE_ASSIGN_OR_RETURN(moe_scratch_, Arena::make(layers_[0].moe->scratch_bytes(t, *transport_)));
  return {};
}

// ---- forward --------------------------------------------------------------------------------------

Status GptOss::forward(const Batch& batch, KvCache& kv, float* logits, ThreadPool& pool) {
  const int64_t t = static_cast<int64_t>(batch.token_ids.size()), h = config_.hidden_size;
  const int64_t num_logit_rows = static_cast<int64_t>(batch.logit_rows.size());
  FP4MOE_CHECK(t <= options_.max_batch_tokens,
               std::to_string(t) + " rows, at most " + std::to_string(options_.max_batch_tokens));
  ops_.embed({embedding_.as<bf16>(), batch.token_ids.data(), act_.residual, t, h}, pool);
  int64_t num_rows = t;
  for (int64_t i = 0; i < config_.num_layers; ++i) {
    const LayerWeights& w = layers_[static_cast<size_t>(i)];
    attention(w, batch, kv.k_pages(i), kv.v_pages(i), pool);
    if (i + 1 == config_.num_layers) {  // nothing reads the other rows any more
      keep_logit_rows(batch);
      num_rows = num_logit_rows;
    }
    attention_output(w, num_rows, pool);
    FP4MOE_RETURN_IF_ERROR(moe(i, num_rows, pool));
  }
  const float eps = static_cast<float>(config_.rms_norm_eps);
  ops_.rms_norm({act_.residual, final_norm_.data(), eps, act(act_.normed, num_rows, h), nullptr}, pool);
  ops_.linear({act(act_.normed, num_rows, h), lm_head_.weight.as<bf16>(), nullptr, logits, lm_head_.n}, pool);
  return {};
}

// residual -> norm -> q, k, v -> rotary -> cache -> attention rows.
void GptOss::attention(const LayerWeights& w, const Batch& batch, KvPages k_pages, KvPages v_pages,
                       ThreadPool& pool) {
  const int64_t t = static_cast<int64_t>(batch.token_ids.size()), h = config_.hidden_size, stride = w.qkv.n;
  const int num_heads = static_cast<int>(config_.num_heads),
            num_kv_heads = static_cast<int>(config_.num_kv_heads);
  const int head_dim = static_cast<int>(config_.head_dim);
  float* q = act_.qkv;
  float* k = q + head_cols(num_heads);
  float* v = k + head_cols(num_kv_heads);

  const float eps = static_cast<float>(config_.rms_norm_eps);
  ops_.rms_norm({act_.residual, w.attention_norm.data(), eps, act(act_.normed, t, h), nullptr}, pool);
  const float* bias = w.qkv.bias.empty() ? nullptr : w.qkv.bias.data();
  ops_.linear({act(act_.normed, t, h), w.qkv.weight.as<bf16>(), bias, act_.qkv, stride}, pool);
  // q and k heads are neighbours in a row, so one call turns both.
  ops_.rope({q, batch.positions.data(), rope_.inv_freq.data(), rope_.attention_factor, t, stride,
             num_heads + num_kv_heads, head_dim, head_dim},
            pool);
  ops_.kv_write({k, v, stride, k_pages, v_pages, batch.sequences}, pool);
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  ops_.attention({q, stride, k_pages, v_pages, batch.sequences, num_heads, scale, w.window, w.sinks.data(),
                  act(act_.attention, t, head_cols(num_heads))},
                 pool);
}

void GptOss::attention_output(const LayerWeights& w, int64_t num_rows, ThreadPool& pool) {
  const float* bias = w.attention_out.bias.empty() ? nullptr : w.attention_out.bias.data();
  ops_.linear({act(act_.attention, num_rows, w.attention_out.k), w.attention_out.weight.as<bf16>(), bias,
               act_.residual, w.attention_out.n, /*accumulate=*/true},
              pool);
}

Status GptOss::moe(int64_t layer, int64_t num_rows, ThreadPool& pool) {
  const LayerWeights& w = layers_[static_cast<size_t>(layer)];
  const ActRows x = act(act_.normed, num_rows, config_.hidden_size);
  const float eps = static_cast<float>(config_.rms_norm_eps);
  ops_.rms_norm({act_.residual, w.moe_norm.data(), eps, x, act_.normed_f32}, pool);
  moe_scratch_.reset();
  return w.moe->forward({static_cast<int>(layer), x, act_.normed_f32, act_.residual}, *transport_,
                        moe_scratch_, pool);
}

// Moves the rows whose logits are wanted (ascending, so never onto one still to be moved) to the front.
void GptOss::keep_logit_rows(const Batch& batch) {
  const size_t residual_bytes = static_cast<size_t>(config_.hidden_size) * sizeof(float);
  const size_t attention_bytes =
      static_cast<size_t>(head_cols(config_.num_heads) * dtype_bits(options_.act_dtype) / 8);
  uint8_t* attention = static_cast<uint8_t*>(act_.attention);
  for (size_t i = 0; i < batch.logit_rows.size(); ++i) {
    const size_t from = static_cast<size_t>(batch.logit_rows[i]);
    if (from == i) continue;
    std::memcpy(act_.residual + i * static_cast<size_t>(config_.hidden_size),
                act_.residual + from * static_cast<size_t>(config_.hidden_size), residual_bytes);
    std::memcpy(attention + i * attention_bytes, attention + from * attention_bytes, attention_bytes);
  }
}

}  // namespace

Result<std::unique_ptr<Model>> load_gpt_oss(const Checkpoint& checkpoint, const ModelConfig& config,
                                            const ModelOptions& options, ThreadPool& pool,
                                            const ProgressSink& progress) {
  auto model = std::make_unique<GptOss>(config, options);
  FP4MOE_RETURN_IF_ERROR(model->load(checkpoint, pool, progress));
  return std::unique_ptr<Model>(std::move(model));
}

}  // namespace fp4moe
