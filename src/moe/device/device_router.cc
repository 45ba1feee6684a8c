#include "moe/device/device_router.h"

#include <string>
#include <vector>

#include "comm/device_communicator.h"

namespace fp4moe {
namespace {

ExpertCountArgs counts_of(const MoeForwardArgs& args, int64_t first_row = 0) {
  if (args.counters == nullptr || args.num_counted == nullptr) return {};
  return {args.counters->on_device(args.layer), args.num_counted, static_cast<int32_t>(first_row)};
}

}  // namespace

Result<DeviceRouter> DeviceRouter::make(const RouterWeights& weights, const RouterShape& shape,
                                        bool batch_invariant, const DenseOps& ops) {
  FP4MOE_RETURN_IF_ERROR(check_router(weights, shape));
  if (shape.num_experts > kMaxDeviceExperts || shape.top_k > kMaxDeviceTopk || shape.hidden_size % 32 != 0)
    return unsupported("a router with " + std::to_string(shape.num_experts) + " experts, top_k=" +
                       std::to_string(shape.top_k) + " and hidden_size=" + std::to_string(shape.hidden_size) +
                       " is not supported on a GPU; use at most " + std::to_string(kMaxDeviceExperts) +
                       " experts, top_k of at most " + std::to_string(kMaxDeviceTopk) +
                       ", and a hidden_size that is a multiple of 32");
  DeviceRouter router;
  router.hidden_size_ = shape.hidden_size;
  router.rule_ = routing_rule(weights, shape);
  router.batch_invariant_ = batch_invariant;
  FP4MOE_ASSIGN_OR_RETURN(
      router.weight_,
      Buffer::copy_of(weights.weight, shape.num_experts * shape.hidden_size * 2, ops.memory()));
  FP4MOE_ASSIGN_OR_RETURN(router.bias_, Buffer::copy_of(weights.bias, ops.memory()));
  FP4MOE_ASSIGN_OR_RETURN(router.correction_bias_, Buffer::copy_of(weights.correction_bias, ops.memory()));
  const std::vector<RouterWord> words(static_cast<size_t>(kRouterFewTokens * shape.num_experts));
  FP4MOE_ASSIGN_OR_RETURN(
      router.words_,
      Buffer::copy_of(words.data(), std::ssize(words) * int64_t{sizeof(RouterWord)}, ops.memory()));
  return router;
}

int64_t DeviceRouter::scratch_bytes(int64_t max_tokens) const {
  return Arena::padded(max_tokens * rule_.num_experts * 4) + 2 * Arena::padded(max_tokens * rule_.top_k * 4) +
         Arena::padded(max_tokens * rule_.top_k * 8);
}

DeviceRouterArgs DeviceRouter::sizes(int64_t num_tokens, const RoutedRound* sent) const {
  return {.weight = weight_.as<bf16>(),
          .bias = bias_.as<float>(),
          .correction_bias = correction_bias_.as<float>(),
          .num_tokens = num_tokens,
          .hidden_size = hidden_size_,
          .rule = rule_,
          .batch_invariant = batch_invariant_,
          .words = words_.as<RouterWord>(),
          .round = sent != nullptr ? &sent->round : nullptr,
          .round_is_direct = sent != nullptr && sent->is_direct};
}

Routes DeviceRouter::route(const DeviceMoeOps& ops, const MoeForwardArgs& args, const RoutedRound* sent,
                           Arena& scratch) const {
  const int64_t num_tokens = args.x.rows, num_slots = num_tokens * rule_.top_k;
  int32_t* const ids = args.expert_ids != nullptr ? args.expert_ids : scratch.take<int32_t>(num_slots);
  const Routes routes = {ids, scratch.take<float>(num_slots)};
  if (args.router_group != nullptr) {
    route_share(ops, args, routes, scratch);
    return routes;
  }
  DeviceRouterArgs router = sizes(num_tokens, sent);
  router.x = args.router_x;
  router.logits = scratch.take<float>(num_tokens * rule_.num_experts);
  router.ids = routes.ids;
  router.weights = routes.weights;
  router.count = counts_of(args);
  router.norm = args.norm;
  ops.route(router);
  return routes;
}

void DeviceRouter::route_share(const DeviceMoeOps& ops, const MoeForwardArgs& args, const Routes& all,
                               Arena& scratch) const {
  const DeviceCommunicator& group = *args.router_group;
  std::vector<int64_t> first = group.row_shares(args.x.rows);
  const auto rank = static_cast<size_t>(group.rank());
  const int64_t own = first[rank], count = first[rank + 1] - own, num_slots = count * rule_.top_k;
  int32_t* const choices = scratch.take<int32_t>(2 * num_slots);  // ids, then weights
  DeviceRouterArgs router = sizes(count);
  router.x = args.router_x + own * hidden_size_;
  router.logits = scratch.take<float>(count * rule_.num_experts);
  router.ids = choices;
  router.weights = reinterpret_cast<float*>(choices + num_slots);
  router.count = counts_of(args, own);
  ops.route(router);
  for (int64_t& row : first) row *= rule_.top_k * int64_t{sizeof(int32_t)};
  const auto* const ids = reinterpret_cast<uint8_t*>(all.ids);
  group.gather_columns({"expert_choices", args.layer}, choices, 2, first, all.ids,
                       {.pitch = reinterpret_cast<uint8_t*>(all.weights) - ids});
}

}  // namespace fp4moe
