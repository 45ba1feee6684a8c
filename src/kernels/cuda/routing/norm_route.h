// Normalises and routes few tokens, or tokens of a layer with few experts, in one launch.
#pragma once

#include "kernels/device_router.h"

namespace fp4moe {

// Returns whether norm_route() supports these sizes and is faster than separate kernels.
bool norm_route_fits(const DeviceRouterArgs& args);
// Returns whether norm_route() can send args.round. Precondition: norm_route_fits().
bool norm_route_sends(const DeviceRouterArgs& args);
// Does the work of cuda_route() with a norm. Precondition: norm_route_fits() and T > 0.
void norm_route(const DeviceRouterArgs& args);

}  // namespace fp4moe
