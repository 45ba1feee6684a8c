// The quantization declaration of a checkpoint, in either of its two places and spellings.
#pragma once

#include "fp4moe/status.h"
#include "io/json_document.h"
#include "io/model_config.h"

namespace fp4moe {

// `config` is config.json, whose quantization_config is read; `hf_quant` is hf_quant_config.json, null where
// the file is absent. kUnsupported names the method or algorithm and what is supported; kInvalidArgument:
// the two places, or one place and itself, disagree.
Result<QuantConfig> parse_quant_config(const Json& config, const Json& hf_quant);

}  // namespace fp4moe
