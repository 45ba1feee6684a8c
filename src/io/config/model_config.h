// The hyper-parameters of a checkpoint: config.json, generation_config.json and the quantization
// declaration (config.json's quantization_config or hf_quant_config.json), parsed, checked and typed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "fp4moe/request.h"
#include "fp4moe/status.h"
#include "io/config/module_patterns.h"

namespace fp4moe {

// How a model's layers are loaded (model/families.h). Families that differ in defaults and names only, such
// as kimi_k2 and deepseek_v3, share a value; their rows are in model_families.cc.
enum class ModelFamily {
  kGptOss,
  kDeepseekV3,
  kQwen3Moe,
  kQwen2Moe,
  kGlm4Moe,
  kQwen3Next,   // and Qwen3.5-MoE
  kEagle3Head,  // the layers of a draft model (eagle3_config.h); no checkpoint of a target has it
};

enum class QuantMethod {
  kNone,
  kMxfp4GptOss,      // dialect C: fused experts, gate and up rows alternate
  kModelOptNvfp4,    // dialect A: per expert or fused, decode-direction scales
  kCompressedNvfp4,  // compressed-tensors nvfp4-pack-quantized: global scales are divisors
  kCompressedMxfp4,  // compressed-tensors mxfp4-pack-quantized
  kQuarkMxfp4,       // AMD Quark: U8 weight, U8 weight_scale
  kFp8Mxfp4,         // quant_method fp8 with FP4 experts (DeepSeek): I8 weight, E8M0 scale
};

// Whether the checkpoint's FP4 tensors use MXFP4 blocks; false for kNone.
constexpr bool is_mxfp4(QuantMethod method) {
  return method == QuantMethod::kMxfp4GptOss || method == QuantMethod::kCompressedMxfp4 ||
         method == QuantMethod::kQuarkMxfp4 || method == QuantMethod::kFp8Mxfp4;
}

// A pattern of modules quantised to a format other than FP4 and FP8.
struct ModuleAlgorithm {
  std::string pattern, algorithm;
};

struct QuantConfig {
  QuantMethod method = QuantMethod::kNone;
  int group_size = 0;       // 32 for MXFP4, 16 for NVFP4
  std::string declared_by;  // the declaring file and key, for messages
  // Patterns for names_module() in quant_config.h; callers use is_excluded() instead.
  ModulePatterns exclude_modules;              // not in FP4: bf16, or FP8 if their tensors are
  ModulePatterns include_modules;              // in FP4; empty: all linear layers that are not excluded
  ModulePatterns fp8_modules;                  // declared as FP8; "Linear": all linear layers not in FP4
  std::vector<ModuleAlgorithm> other_modules;  // refused, unless they belong to MTP layers
  std::string text_prefix;    // ModelConfig::text_prefix, with which patterns may name modules
  int64_t mtp_layer = -1;     // ModelConfig::mtp_layer
  std::string kv_cache_type;  // the declared type of the KV cache, such as "FP8"; empty: none declared
};

struct RopeConfig {
  enum class Type { kDefault, kYarn };
  Type type = Type::kDefault;
  double theta = 10000;
  double factor = 1;  // YaRN
  double beta_fast = 32, beta_slow = 1;
  double original_max_position_embeddings = 0;
  bool truncate = true;                          // round the ramp's bounds to integers
  std::optional<double> attention_factor;        // if given; default 0.1 ln(factor) + 1
  std::optional<double> mscale, mscale_all_dim;  // DeepSeek
};

// How the chosen experts' weights are computed (DeepSeek, GLM, Qwen); gpt-oss softmaxes the chosen logits.
struct RoutingConfig {
  int64_t num_groups = 1, top_k_groups = 1;  // group-limited choice; 1 of 1: not limited
  bool norm_top_k = false;                   // the chosen experts' weights are divided by their sum
  double scaling_factor = 1;                 // routed_scaling_factor
  bool has_correction_bias = false;          // DeepSeek, GLM: e_score_correction_bias affects the choice only
};

// Multi-head latent attention (DeepSeek, Kimi, GLM-4.7-Flash). A query or key head is [nope, rope].
struct MlaConfig {
  int64_t q_lora_rank = 0;  // 0: queries are not compressed
  int64_t kv_lora_rank = 0, qk_nope_head_dim = 0, qk_rope_head_dim = 0, v_head_dim = 0;
  bool rope_interleave = true;  // true: rotated pairs are (2i, 2i+1); false: (i, i + dim/2)
};

// Gated delta net: the layers that keep a state of fixed size instead of keys and values.
struct DeltaConfig {
  static constexpr int64_t kMaxHeadDim = 256, kMaxConvWidth = 8;
  // Value heads: a multiple of key heads; 0: the model has no such layers.
  int64_t num_key_heads = 0, num_value_heads = 0;
  int64_t key_head_dim = 0, value_head_dim = 0;
  int64_t conv_width = 0;  // taps of the convolution over time
  // Qwen3-Next: "in_proj_qkvz" and "in_proj_ba" hold the rows of one key head and its value heads after
  // another. Otherwise "in_proj_qkv", "in_proj_z", "in_proj_b" and "in_proj_a" hold all heads' rows.
  bool has_grouped_inputs = false;
  int64_t conv_channels() const {
    return 2 * num_key_heads * key_head_dim + num_value_heads * value_head_dim;
  }
};

// Large because it holds the hyper-parameters of every family.
struct ModelConfig {
  ModelFamily family = ModelFamily::kGptOss;
  std::string architecture, model_type;
  // Prefix of the text model's tensors in published checkpoints (tensor_names.h); empty: text-only model.
  std::string text_prefix;
  int64_t vocab_size = 0, hidden_size = 0, num_layers = 0;
  int64_t num_heads = 0, num_kv_heads = 0;
  int64_t head_dim = 0;                  // of queries and keys; DeepSeek: nope + rope
  int64_t rotary_dim = 0;                // the dims of a head that RoPE rotates
  int64_t num_experts = 0, top_k = 0;    // top_k = num_experts_per_tok
  int64_t intermediate_size = 0;         // of one expert
  int64_t dense_intermediate_size = 0;   // MLP of layers without experts; 0: every layer has experts
  int64_t num_shared_experts = 0;        // run for every token
  int64_t shared_intermediate_size = 0;  // of all shared experts together
  bool shared_expert_gate = false;       // Qwen2: the shared expert's output is scaled by sigmoid(x . gate)
  bool qk_norm = false;                  // RMS norm on every query and key head (Qwen3; GLM if set)
  int64_t num_mtp_layers = 0;            // declared layers after num_layers; skipped by name (mtp_layers.h)
  bool may_have_mtp_layer = false;       // config.json does not declare them, but there may be one
  // num_layers if the family stores its MTP layer below "mtp." (tensor_names.h); -1: as a layer of the model.
  int64_t mtp_layer = -1;
  std::vector<bool> layer_has_experts;  // [num_layers]; empty: all layers have experts
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-5;
  bool attention_bias = false;      // on q, k and v; DeepSeek: on q_a and kv_a
  bool attention_out_bias = false;  // on o
  bool tie_word_embeddings = false;
  DType dense_dtype = DType::kBF16;  // of unquantised tensors
  RopeConfig rope;
  std::vector<int64_t> layer_windows;  // [num_layers]; 0: full attention; otherwise the sliding window
  float swiglu_alpha = 1.702f, swiglu_limit = 7.0f;  // gpt-oss
  RoutingConfig router;
  MlaConfig mla;                      // kv_lora_rank 0: grouped-query attention
  DeltaConfig delta;                  // of the layers with states
  std::vector<bool> layer_has_state;  // [num_layers]; empty: every layer attends
  bool attention_gate = false;  // q_proj has a gate row for each query row; sigmoid(gate) scales the outputs
  bool centered_norms = false;  // a norm's factor is 1 + weight (folded at load)
  QuantConfig quant;
  std::vector<int32_t> eos_token_ids;  // from generation_config.json, otherwise from config.json
  SamplingParams default_sampling;     // values set in generation_config.json

  bool has_state(int64_t layer) const {
    return !layer_has_state.empty() && layer_has_state[static_cast<size_t>(layer)];
  }
  bool has_state() const {  // whether any layer has
    return std::find(layer_has_state.begin(), layer_has_state.end(), true) != layer_has_state.end();
  }
};

// Parses and checks the files. `config_json` etc. are their contents, empty for an absent file.
// kInvalidArgument names the key, the value and the legal values; kUnsupported names the architecture or
// feature; kDataLoss, with the position: a file is not JSON. Counts are checked for consistency, and their
// legal ranges guarantee that no product of a model's sizes overflows 63 bits.
Result<ModelConfig> parse_model_config(std::string_view config_json, std::string_view generation_config_json,
                                       std::string_view hf_quant_config_json);
// Reads the files from a checkpoint folder and does the same.
Result<ModelConfig> load_model_config(const std::string& folder);

}  // namespace fp4moe
