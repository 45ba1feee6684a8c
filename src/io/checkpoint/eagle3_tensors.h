// The tensors of an EAGLE-3 head under one set of names, whichever set its checkpoint uses:
//
//   here                                         also stored as
//   model.layers.0.*                             midlayer.*
//   fc_norm.0.weight, .1.weight, .2.weight       aux_norm_low.weight, aux_norm_mid.weight,
//   aux_norm_high.weight model.layers.*, model.norm.weight,           without "model."
//     model.embed_tokens.weight
//   fc.weight, input_norm.weight, fc_norm.*,     with "model."
//     lm_head.weight, d2t, t2d
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/checkpoint/checkpoint.h"
#include "io/config/eagle3_config.h"

namespace fp4moe {

// Returns the name here of a tensor that is stored as `stored`.
std::string eagle3_tensor_name(std::string_view stored);

// Returns a view of the head's tensors under these names, without those that do not matter ("*.inv_freq").
// `stored` must outlive it. kDataLoss: two tensors have the same meaning. kUnsupported: a tensor that the
// configured head does not use, or no tensor where the target's cannot replace it.
Result<Checkpoint> eagle3_tensors(const Checkpoint& stored, const Eagle3Config& config);

// Opens a head's checkpoint and makes the checks of eagle3_tensors() with its config.json for this target.
Result<Checkpoint> open_eagle3_head(const std::string& folder, const ModelConfig& target);

// Returns the target's id of each of the draft's ids, or an empty vector if they are the same. `tensors`: of
// eagle3_tensors(). kDataLoss: an id that is not in the target's vocabulary, or "t2d" differs from "d2t".
Result<std::vector<int32_t>> eagle3_token_ids(const Checkpoint& tensors, const Eagle3Config& config);

}  // namespace fp4moe
