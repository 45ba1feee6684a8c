// A whole layer on a GPU: sort, both GEMMs, combine. What the tactics "sorted" and "wide" of a table are made
// of.
#pragma once

#include "kernels/device_moe.h"

namespace fp4moe {

// `gemms` runs gate_up and down, with the intermediate as h and rows.progress to count in.
void run_sorted_layer(const DeviceMoeArgs& args, void (*gemms)(const DeviceExpertArgs&));
constexpr bool sorted_layer_fits(const DeviceMoeArgs&) { return true; }
int64_t sorted_layer_workspace_bytes(const TiledExperts& experts, int64_t max_tokens, int64_t topk);

// The same with rows gathered into slabs. Hopper only.
void run_wide_layer(const DeviceMoeArgs& args);
int64_t wide_layer_workspace_bytes(const TiledExperts& experts, int64_t max_tokens, int64_t topk);

}  // namespace fp4moe
