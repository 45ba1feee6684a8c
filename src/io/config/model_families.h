// The table of families, the keys of config.json that differ between them, and the legal ranges of all keys.
// Only for the .cc files in this folder.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "io/config/model_config.h"
#include "io/json_fields.h"

namespace fp4moe {

// Legal ranges. E * 2I * H * layers < 2^60, V * H < 2^43, and the KV cache of all positions (layers *
// positions * KV heads * head size * 2 * 4 bytes) <= 2^60: no product overflows 63 bits.
inline constexpr JsonFields::IntRange kWidths = {1, 1 << 18};  // H, I, ranks
inline constexpr JsonFields::IntRange kExperts = {1, 1 << 12};
inline constexpr JsonFields::IntRange kLayers = {1, 1 << 10};
inline constexpr JsonFields::IntRange kHeads = {1, 1 << 10};
inline constexpr JsonFields::IntRange kHeadDims = {2, 1 << 10};
inline constexpr JsonFields::IntRange kDeltaHeadDims = {1, DeltaConfig::kMaxHeadDim};
inline constexpr JsonFields::IntRange kConvWidths = {1, DeltaConfig::kMaxConvWidth};
inline constexpr JsonFields::IntRange kVocab = {1, 1 << 24};
inline constexpr JsonFields::IntRange kPositions = {1, 1 << 27};
inline constexpr double kHuge = 1e9;

// Returns "key = value", for messages.
std::string equals(const char* key, int64_t value);

// The defaults of a family's stock transformers class for keys that config.json lacks.
struct StockDefaults {
  double rms_norm_eps = 1e-6;
  int64_t num_kv_heads = 0;  // 0: same as num_attention_heads (latent attention has no KV heads)
  int64_t head_dim = 0;      // 0: hidden_size / num_attention_heads
  double rope_theta = 10000;
  int32_t eos_token_id = -1;  // -1: none
  bool attention_bias = false, tie_word_embeddings = false;
  double partial_rotary_factor = 0;      // 0: RoPE rotates whole heads, and no other factor is supported
  int64_t dense_intermediate_size = 0;   // 0: the key must be present
  int64_t shared_intermediate_size = 0;  // 0: the key must be present
  // DeepSeek's layers:
  int64_t q_lora_rank = 0, num_groups = 1, top_k_groups = 1, num_dense_layers = 1;
  double routed_scaling_factor = 1;
};

// One model_type.
struct FamilyRow {
  ModelFamily family;
  const char* model_type;
  std::vector<const char*> architectures;
  const char* experts_key;
  const char* expert_width_key;  // I of one expert
  // Reads the keys specific to the family; `config` already has the sizes common to all families.
  void (*read)(JsonFields& fields, const StockDefaults& stock, ModelConfig& config);
  StockDefaults stock;
  // If not empty: the text model's keys are in text_config, whose model_type must be one of these, and its
  // tensors have the prefix text_prefix.
  std::vector<const char*> text_model_types = {};
  const char* text_prefix = "";
  const char* fp4_exports = nullptr;  // named if the publisher's own quantization is refused
};

std::span<const FamilyRow> model_families();

// Reads head_dim. Without the key it is stock_head_dim or, if that is 0 or the key is null, hidden_size /
// num_heads.
void read_head_dim(JsonFields& fields, int64_t stock_head_dim, ModelConfig& config);

// Reads rope_parameters {rope_type, rope_theta, ...}, or the older rope_theta plus rope_scaling {rope_type or
// type, ...}, and partial_rotary_factor; sets rope and rotary_dim. Called after FamilyRow::read.
void read_rope(JsonFields& fields, const StockDefaults& stock, ModelConfig& config);

}  // namespace fp4moe
