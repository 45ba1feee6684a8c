// The quantization declaration of a checkpoint, in either of its two places and any of its spellings.
#pragma once

#include <string>
#include <string_view>

#include "fp4moe/status.h"
#include "io/json_document.h"
#include "io/model_config.h"

namespace fp4moe {

// `config` is config.json, whose quantization_config is read; `hf_quant` is hf_quant_config.json, null where
// the file is absent. kUnsupported names the method or algorithm and what is supported; kInvalidArgument:
// the two places, or one place and itself, disagree, or a pattern does not compile.
Result<QuantConfig> parse_quant_config(const Json& config, const Json& hf_quant);

// Whether the declaration's pattern names `module` ("model.layers.3.self_attn.q_proj"), both without a
// leading "language_model." A pattern is "re:" and a regular expression that matches from the start, or a
// glob of `*` and `?` that is the name of the module or of one that holds it, or, without a dot, any part of
// the name. Of DeepSeek's q_a, q_b, kv_a and kv_b projections a pattern also names the fused module they are
// part of.
bool names_module(const std::string& pattern, std::string_view module);

// Whether the declaration leaves `module`, a linear layer, unquantised.
bool is_excluded(const QuantConfig& quant, std::string_view module);

}  // namespace fp4moe
