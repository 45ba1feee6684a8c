// Norm and route of few tokens, or few experts, as one launch.
#pragma once

#include "kernels/device_router.h"

namespace fp4moe {

// Whether norm_route() supports these sizes and is faster than separate kernels.
bool norm_route_fits(const DeviceRouterArgs& args);
// cuda_route() with a norm. Precondition: norm_route_fits(), T > 0.
void norm_route(const DeviceRouterArgs& args);

}  // namespace fp4moe
