// The scales that a checkpoint stores for an FP8 KV cache.
#pragma once

#include <string>
#include <string_view>

#include "io/checkpoint/checkpoint.h"

namespace fp4moe {

// A key or value of a layer is its E4M3 code times the scale.
struct KvScales {
  float k = 1, v = 1;
};

// Whether the tensor is a scale of a quantised KV cache, or of the queries beside it.
bool is_kv_scale(std::string_view name);
// Returns the scales of the attention with this prefix ("model.layers.0.self_attn."), 1 if the checkpoint has
// none. A layer that stores only one of the two uses it for both. Legal: f32 or bf16 with one element, finite
// and positive, with a finite reciprocal.
Result<KvScales> load_kv_scales(const Checkpoint& checkpoint, const std::string& prefix);

}  // namespace fp4moe
