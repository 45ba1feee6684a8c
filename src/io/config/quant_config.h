// Parses a checkpoint's quantization declaration, from either of its two locations and in any of its forms.
#pragma once

#include <string>
#include <string_view>

#include "fp4moe/status.h"
#include "io/config/model_config.h"
#include "io/json_document.h"

namespace fp4moe {

// Parses the declaration. `config` is config.json, whose quantization_config is read; `hf_quant` is
// hf_quant_config.json, null if the file is absent. kUnsupported names the method or algorithm and the
// supported ones; kInvalidArgument: the two locations contradict each other, one of them contradicts itself,
// or a pattern does not compile.
Result<QuantConfig> parse_quant_config(const Json& config, const Json& hf_quant);

// Whether the declaration's pattern matches `module` ("model.layers.3.self_attn.q_proj"), by its stored name
// or that of text_model_name() (tensor_names.h). A pattern is "re:" plus a regular expression anchored at the
// start, or a glob with `*` and `?`. A glob must match the full name of the module or of a parent, or, if it
// has no dot, any one component of the name. A pattern for one of DeepSeek's q_a, q_b, kv_a and kv_b
// projections also matches the fused module that contains it.
bool names_module(const std::string& pattern, std::string_view module);

// Whether the declaration leaves the linear layer `module` of the text model out of FP4.
bool is_excluded(const QuantConfig& quant, std::string_view module);

// Whether the declaration lists its FP4 modules, and the linear layer `module` of the text model is one of
// them. False if all layers that it does not exclude are FP4.
bool is_declared_fp4(const QuantConfig& quant, std::string_view module);

// Whether the declaration says that the linear layer `module` is FP8. Checkpoints may hold other modules in
// FP8, or these in bf16: the tensors decide.
bool is_declared_fp8(const QuantConfig& quant, std::string_view module);

}  // namespace fp4moe
