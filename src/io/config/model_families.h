// The keys of config.json that differ between families, and the legal ranges of all keys. Only for the .cc
// files in this folder.
#pragma once

#include <string>

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
inline constexpr JsonFields::IntRange kVocab = {1, 1 << 24};
inline constexpr JsonFields::IntRange kPositions = {1, 1 << 27};
inline constexpr double kHuge = 1e9;

// Returns "key = value", for messages.
std::string equals(const char* key, int64_t value);

// Reads the keys specific to config.family. `fields` is config.json; `config` already has the sizes common to
// all families.
void read_family(JsonFields& fields, ModelConfig& config);

// Reads rope_parameters {rope_type, rope_theta, ...}, or the older rope_theta plus rope_scaling {rope_type or
// type, ...}.
void read_rope(JsonFields& fields, ModelConfig& config);

}  // namespace fp4moe
