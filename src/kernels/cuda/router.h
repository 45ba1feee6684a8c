// The router on a GPU: gate GEMM, scoring and choice.
#pragma once

#include "kernels/device_router.h"

namespace fp4moe {

// Two launches on the current stream, none for T = 0. The logits are f32 sums of exact products, the bias
// last.
void cuda_route(const DeviceRouterArgs& args);

}  // namespace fp4moe
