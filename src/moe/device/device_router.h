// DeviceRouter: the router of a GPU layer, with its weights in device memory.
#pragma once

#include <cstdint>

#include "base/buffer.h"
#include "kernels/device_a2a.h"
#include "kernels/device_moe.h"
#include "kernels/device_router.h"
#include "moe/moe_layer.h"
#include "moe/router.h"

namespace fp4moe {

// A round of an exchange that the router's launch sends (DeviceRouterArgs::round).
struct RoutedRound {
  A2aRound round;
  bool is_direct = false;
};

class DeviceRouter {
 public:
  // Copies the weights to the memory of `ops`. batch_invariant: DeviceRouterArgs::batch_invariant.
  // kInvalidArgument as for ExpertRouter::make(); kUnsupported for sizes beyond a GPU's limits; kDoesNotFit
  // if memory allocation fails.
  static Result<DeviceRouter> make(const RouterWeights& weights, const RouterShape& shape,
                                   bool batch_invariant, const DenseOps& ops);

  int64_t top_k() const { return rule_.top_k; }
  int64_t hidden_size() const { return hidden_size_; }
  int64_t weight_bytes() const { return weight_.num_bytes(); }
  // Maximum number of bytes that route() takes from its arena for up to max_tokens rows.
  int64_t scratch_bytes(int64_t max_tokens) const;
  // The arguments of DeviceMoeOps::route() that do not depend on the batch's memory.
  DeviceRouterArgs sizes(int64_t num_tokens, const RoutedRound* sent = nullptr) const;
  // Enqueues the choice of experts for args.router_x. With args.router_group, this rank routes its share of
  // the rows, and the ranks exchange the choices. sent: null, or the round to send.
  Routes route(const DeviceMoeOps& ops, const MoeForwardArgs& args, const RoutedRound* sent,
               Arena& scratch) const;

 private:
  void route_share(const DeviceMoeOps& ops, const MoeForwardArgs& args, const Routes& all,
                   Arena& scratch) const;

  Buffer weight_, bias_, correction_bias_;  // [E, H] bf16, [E] f32 or empty, [E] f32 or empty
  Buffer words_;                            // DeviceRouterArgs::words
  RoutingRule rule_;
  int64_t hidden_size_ = 0;
  bool batch_invariant_ = false;
};

}  // namespace fp4moe
