// fp4moe inspect --numerics: reports the quantisation error per layer and expert.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "io/checkpoint/checkpoint.h"
#include "io/config/model_config.h"

namespace fp4moe {

// Returns an array of layers: {layer, format, errors {scheme: relative L2 error against w4a16 over all
// experts}, missing_input_scales, gate_up_scale_mismatches, experts [{expert, errors, gate, up, down
// {tensor_scale, input_scale, saturated_codes, saturated_scales, zero_blocks: fractions}, odd [texts]}]}.
// Errors are measured on random normal rows. layer < 0: all layers.
Result<nlohmann::ordered_json> numerics_report(const Checkpoint& checkpoint, const ModelConfig& config,
                                               int64_t layer);

// Prints the report: two lines per layer, and one line per unusual scale of an expert.
void print_numerics(const nlohmann::ordered_json& layers);

}  // namespace fp4moe
