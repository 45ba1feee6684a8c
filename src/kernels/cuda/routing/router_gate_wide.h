// The router's logits for many tokens on Hopper.
#pragma once

#include "kernels/device_router.h"

namespace fp4moe {

// Returns whether router_gate_wide() supports these sizes on the current GPU and is faster than the kernels
// for any number of tokens, whose bits differ.
bool router_gate_wide_fits(const DeviceRouterArgs& args);
// Does the work of router_gate(). Precondition: router_gate_wide_fits().
void router_gate_wide(const DeviceRouterArgs& args);

}  // namespace fp4moe
