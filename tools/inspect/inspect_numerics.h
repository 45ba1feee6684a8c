// fp4moe inspect --numerics: the quantisation error per layer and expert.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "io/checkpoint/checkpoint.h"
#include "io/config/model_config.h"

namespace fp4moe {

// An array of layers: {layer, format, errors {scheme: relative L2 to w4a16 over all experts},
// missing_input_scales, gate_up_scale_mismatches, experts [{expert, errors, gate, up, down {tensor_scale,
// input_scale, saturated_codes, saturated_scales, zero_blocks: fractions}, odd [texts]}]}. Errors are
// measured on random normal rows. layer < 0: all.
Result<nlohmann::ordered_json> numerics_report(const Checkpoint& checkpoint, const ModelConfig& config,
                                               int64_t layer);

// Prints the report: a line per layer, and one per expert with something odd.
void print_numerics(const nlohmann::ordered_json& layers);

}  // namespace fp4moe
