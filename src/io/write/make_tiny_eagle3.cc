#include "io/write/make_tiny_eagle3.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "base/check.h"
#include "io/config/eagle3_config.h"
#include "io/file.h"
#include "io/json_document.h"
#include "io/write/make_tiny_tensors.h"
#include "io/write/new_checkpoint.h"

namespace fp4moe {
namespace {

constexpr float kNormLevel = 0.2f;

// The first, the middle and the last of n layers, without repetitions.
Json feature_layers(int64_t n) {
  const std::set<int64_t> layers = {0, n / 2, n - 1};
  return layers;
}

Json default_config(const ModelConfig& target) {
  return {{"architectures", {"LlamaForCausalLMEagle3"}},
          {"model_type", "llama"},
          {"vocab_size", target.vocab_size},
          {"draft_vocab_size", (target.vocab_size + 1) / 2},
          {"hidden_size", target.hidden_size},
          {"intermediate_size", 2 * target.hidden_size},
          {"num_hidden_layers", 1},
          {"num_attention_heads", target.num_heads},
          {"num_key_value_heads", target.num_kv_heads},
          {"head_dim", target.head_dim},
          {"max_position_embeddings", 2048},
          {"rms_norm_eps", 1e-5},
          {"rope_theta", 10000.0},
          {"rope_scaling", Json()},
          {"hidden_act", "silu"},
          {"torch_dtype", "bfloat16"},
          {"eagle_config",
           {{"eagle_aux_hidden_state_layer_ids", feature_layers(target.num_layers)},
            {"use_aux_hidden_state", true}}}};
}

// The target's id of a draft's id.
int64_t spread_id(int64_t id, const Eagle3Config& config) {
  return id * config.target_vocab_size / config.layers.vocab_size;
}

class HeadTensors {
 public:
  HeadTensors(const Eagle3Config& config, const MakeTinyEagle3Options& options)
      : config_(config), options_(options) {}

  std::vector<TinyTensor> list() {
    const int64_t h = config_.layers.hidden_size, part = config_.target_hidden_size;
    const int64_t draft = config_.layers.vocab_size, all = config_.target_vocab_size;
    if (config_.norm_before_fc) add_norm("input_norm", config_.feature_width());
    for (int64_t i = 0; config_.fc_norm && i < config_.num_features(); ++i)
      add_norm("fc_norm." + std::to_string(i), part);
    if (config_.has_fc()) add_matrix("fc", h, config_.feature_width());
    for (int64_t layer = 0; layer < config_.layers.num_layers; ++layer) add_layer(layer);
    add_norm("norm", h);
    if (options_.has_embedding || h != part) add("embed_tokens.weight", {all, h}, TinyContent::kNormal, 1);
    if (options_.has_lm_head || h != part || draft < all) add_matrix("lm_head", draft, h);
    if (draft == all) return std::move(tensors_);
    add("d2t", {draft}, TinyContent::kCodes, 1, DType::kI64);
    add("t2d", {all}, TinyContent::kCodes, 1, DType::kBool);
    return std::move(tensors_);
  }

 private:
  void add(const std::string& name, std::vector<int64_t> shape, TinyContent content, float level,
           DType dtype = DType::kBF16) {
    tensors_.push_back({.spec = {.name = name, .dtype = dtype, .shape = std::move(shape)},
                        .content = content,
                        .level = level});
  }
  void add_norm(const std::string& name, int64_t size) {
    add(name + ".weight", {size}, TinyContent::kNearOne, kNormLevel);
  }
  // Inputs of magnitude 1 have outputs of magnitude 1.
  void add_matrix(const std::string& name, int64_t rows, int64_t cols) {
    add(name + ".weight", {rows, cols}, TinyContent::kNormal, 1 / std::sqrt(static_cast<float>(cols)));
  }
  void add_layer(int64_t layer) {
    const ModelConfig& c = config_.layers;
    const std::string prefix =
        c.num_layers == 1 ? std::string("midlayer.") : "layers." + std::to_string(layer) + ".";
    const int64_t h = c.hidden_size, input = layer == 0 ? 2 * h : h;
    add_norm(prefix + "input_layernorm", h);
    if (layer == 0) add_norm(prefix + "hidden_norm", h);
    add_matrix(prefix + "self_attn.q_proj", c.num_heads * c.head_dim, input);
    add_matrix(prefix + "self_attn.k_proj", c.num_kv_heads * c.head_dim, input);
    add_matrix(prefix + "self_attn.v_proj", c.num_kv_heads * c.head_dim, input);
    add_matrix(prefix + "self_attn.o_proj", h, c.num_heads * c.head_dim);
    add_norm(prefix + "post_attention_layernorm", h);
    add_matrix(prefix + "mlp.gate_proj", c.dense_intermediate_size, h);
    add_matrix(prefix + "mlp.up_proj", c.dense_intermediate_size, h);
    add_matrix(prefix + "mlp.down_proj", h, c.dense_intermediate_size);
  }

  const Eagle3Config& config_;
  const MakeTinyEagle3Options& options_;
  std::vector<TinyTensor> tensors_;
};

Status push_vocabulary_map(const TensorSpec& spec, const Eagle3Config& config, const ByteSink& sink) {
  std::vector<int64_t> offsets;
  std::vector<uint8_t> is_drafted(static_cast<size_t>(config.target_vocab_size));
  for (int64_t id = 0; id < config.layers.vocab_size; ++id) {
    offsets.push_back(spread_id(id, config) - id);
    is_drafted[static_cast<size_t>(spread_id(id, config))] = 1;
  }
  if (spec.name == "t2d") return sink(is_drafted);
  return sink({reinterpret_cast<const uint8_t*>(offsets.data()), offsets.size() * sizeof(int64_t)});
}

}  // namespace

Status make_tiny_eagle3(const std::string& folder, const MakeTinyEagle3Options& options) {
  FP4MOE_ASSIGN_OR_RETURN(const ModelConfig target, load_model_config(options.target));
  FP4MOE_ASSIGN_OR_RETURN(const Json changes, parse_json(options.changes, "the head's changes"));
  if (!changes.is_object())
    return invalid_argument("the head's changes are " + json_brief(changes) + "; legal: a JSON object");
  Json json = default_config(target);
  json.merge_patch(changes);
  const std::string text = json.dump(1) + "\n";
  FP4MOE_ASSIGN_OR_RETURN(const Eagle3Config config, parse_eagle3_config(text, target));
  FP4MOE_RETURN_IF_ERROR(prepare_folder(folder));
  const std::vector<TinyTensor> tensors = HeadTensors(config, options).list();
  std::vector<TensorSpec> specs;
  std::map<std::string, const TinyTensor*> by_name;
  for (const TinyTensor& tensor : tensors) {
    specs.push_back(tensor.spec);
    by_name[tensor.spec.name] = &tensor;
  }
  FP4MOE_RETURN_IF_ERROR(check_space(folder, specs));
  FP4MOE_RETURN_IF_ERROR(write_safetensors_shards(
      folder, specs, /*num_shards=*/1, [&](const TensorSpec& spec, const ByteSink& sink) {
        if (spec.name == "d2t" || spec.name == "t2d") return push_vocabulary_map(spec, config, sink);
        return fill_tiny_tensor(*by_name.at(spec.name), options.seed, sink);
      }));
  return write_text_file(folder + "/config.json", text);
}

}  // namespace fp4moe
