// Tensors that are present and known but not used, such as those of a vision model.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "io/checkpoint/checkpoint.h"

namespace fp4moe {

// Returns a log line about the tensors whose names `is_skipped` accepts: "skipping 9 tensors (1234 bytes)
// `what`; the first is 'model.layers.61.eh_proj.weight'"; empty if the checkpoint has none.
std::string describe_skipped(const Checkpoint& checkpoint,
                             const std::function<bool(std::string_view)>& is_skipped, const char* what);

}  // namespace fp4moe
