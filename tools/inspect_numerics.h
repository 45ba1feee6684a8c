// fp4moe inspect --numerics: what quantisation costs, layer by layer and expert by expert.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "io/checkpoint.h"
#include "io/model_config.h"

namespace fp4moe {

// An array of layers: {layer, format, errors {scheme: relative L2 to w4a16 over all experts},
// missing_input_scales, gate_up_scale_mismatches, experts [{expert, errors, gate, up, down {tensor_scale,
// input_scale, saturated_codes, saturated_scales, zero_blocks: shares}, odd [texts]}]}. Errors are those of
// random normal rows. layer < 0: all.
Result<nlohmann::ordered_json> numerics_report(const Checkpoint& checkpoint, const ModelConfig& config,
                                               int64_t layer);

// The same for people: a line a layer, and one for each expert with something odd.
void print_numerics(const nlohmann::ordered_json& layers);

}  // namespace fp4moe
