// The router on a GPU: gate GEMM, scoring and choice.
#pragma once

#include "kernels/device_router.h"

namespace fp4moe {

// Enqueues the router on the current stream: two launches; with a norm, one (norm_route.h) or three; none if
// T = 0. The logits are f32 sums, to which the bias is added last.
void cuda_route(const DeviceRouterArgs& args);
// Returns whether cuda_route() with a norm is one launch.
bool cuda_route_fuses_norm(const DeviceRouterArgs& args);
// Returns whether this launch can send args.round.
bool cuda_route_sends(const DeviceRouterArgs& args);
// The two launches without a norm, T > 0: the logits, then ids, weights and counts.
void router_gate(const DeviceRouterArgs& args);
void router_choose(const DeviceRouterArgs& args);

}  // namespace fp4moe
