// The storage format of every matrix of a checkpoint, by kind of module: what `fp4moe inspect` reports.
#pragma once

#include <map>
#include <string>

#include "io/checkpoint/checkpoint.h"
#include "io/config/model_config.h"

namespace fp4moe {

// Maps a kind of module, its name without layer and expert numbers ("self_attn.q_proj",
// "mlp.experts.up_proj"), to the formats of its matrices and the number of matrices in each: "nvfp4",
// "mxfp4", "fp8 per tensor", "fp8 per row", "fp8 per 128x128 block", or a dtype such as "BF16".
std::map<std::string, std::map<std::string, int64_t>> module_formats(const Checkpoint& checkpoint,
                                                                     const ModelConfig& config);

}  // namespace fp4moe
