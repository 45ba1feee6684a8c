// One MoE layer: route -> dispatch -> run the experts -> combine, according to an immutable plan.
#pragma once

#include <cstdint>
#include <memory>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "io/checkpoint/expert_weights.h"
#include "kernels/ops.h"
#include "kernels/weight_bytes.h"
#include "moe/expert_counters.h"
#include "moe/placement/placed_experts.h"
#include "moe/plan/plan.h"
#include "moe/router.h"
#include "moe/transport/transport.h"

namespace fp4moe {

class DeviceCommunicator;  // comm/device_communicator.h
class DeviceExchange;      // moe/device/device_exchange.h
struct MoeCombineArgs;     // kernels/device_moe.h

struct MoeForwardArgs {
  int layer = 0;
  ActRows x;                        // [T, H]: the experts' input, in the plan's activation type
  const float* router_x = nullptr;  // [T, H] f32: the same rows unrounded, the router's input
  float* residual = nullptr;        // [T, H] f32: the layer's output is added to it
  // If set, the layer first runs this RMSNorm to produce x and router_x; null: they are already computed.
  const RmsNormArgs* norm = nullptr;
  ExpertCounters* counters = nullptr;    // null, or counts the routed tokens of each expert
  const int32_t* num_counted = nullptr;  // GPU: [1] in device memory: rows from this index on are padding
  int32_t* expert_ids = nullptr;         // out [T, K] or null: logical experts of the rows this rank routes
  // GPU, several ranks: [T, H] f32 or null. If set, it receives this rank's part of the output, and the
  // residual is unchanged.
  float* partial = nullptr;
  PartialsToSend* send = nullptr;  // with `partial` and without `exchange`: sends it if a kernel can
  // GPU: if set, leaves_rows() holds, and it receives the rows of this rank's experts, which the caller
  // combines before it takes scratch memory; `partial` is null.
  MoeCombineArgs* uncombined = nullptr;
  // GPU, several ranks: if set, router_x has only this rank's share of the rows; the ranks of this group,
  // which have the others, exchange the experts that they choose. Only if routes_shares().
  const DeviceCommunicator* router_group = nullptr;
  // GPU, if exchanges_rows(): sends rows to the ranks of their experts. `partial`, if set, then receives the
  // complete output of the rows that this rank dispatched, and zeros for all other rows.
  const DeviceExchange* exchange = nullptr;
  int64_t largest_group_rows = 0;  // with `exchange`: T of the largest group; the same on all ranks
  WeightBytes next;                // GPU: weights that are read first after this layer; DeviceMoeArgs::next
};

// A shared expert and, if the model has one, the gate vector: sigmoid(gate . x) scales its output.
struct SharedExpertWeights {
  MlpWeightsView mlp;
  const bf16* gate = nullptr;  // [H] or null
};

class MoeLayer {
 public:
  // Packs this rank's part of the experts, and of the shared expert unless `shared` is null, into the plan's
  // layout; the sources may be released afterwards. kDoesNotFit if memory allocation fails.
  static Result<std::unique_ptr<MoeLayer>> make(const MoePlan& plan, const DenseOps& ops,
                                                const RouterWeights& router, const MoeWeightsView& weights,
                                                const SharedExpertWeights* shared, ThreadPool& pool);
  virtual ~MoeLayer() = default;

  // Maximum number of bytes that forward_moe() takes from the arena for up to max_tokens rows of the group.
  virtual int64_t scratch_bytes(int64_t max_tokens, const Transport& transport) const = 0;
  virtual int64_t weight_bytes() const = 0;
  // Whether forward_moe() runs MoeForwardArgs::norm together with the router for this many rows. If not, the
  // caller loses nothing by running the norm itself, together with what precedes it.
  virtual bool norms_with_router(int64_t num_rows) const = 0;
  // Whether MoeForwardArgs::uncombined is allowed for this many rows, without `exchange`.
  virtual bool leaves_rows(int64_t) const { return false; }
  // Whether MoeForwardArgs::router_group is allowed, without `exchange`.
  virtual bool routes_shares() const { return false; }
  // Null unless the plan places experts. A new layer has the trivial placement: its weights are all physical
  // experts, and the caller sets another one if they are in another order.
  virtual PlacedExperts* placed_experts() { return nullptr; }
  // An error fails the whole job: a peer failed, disagreed or timed out.
  virtual Status forward_moe(const MoeForwardArgs& args, Transport& transport, Arena& scratch,
                             ThreadPool& pool) const = 0;
};

}  // namespace fp4moe
