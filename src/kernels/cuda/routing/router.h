// The router on a GPU: gate GEMM, scoring and choice.
#pragma once

#include "kernels/device_router.h"

namespace fp4moe {

// Enqueued on the current stream: two launches, with a norm one (norm_route.h) or three; none for T = 0. The
// logits are f32 sums, the bias added last.
void cuda_route(const DeviceRouterArgs& args);

}  // namespace fp4moe
