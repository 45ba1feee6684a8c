// DeviceExpertRunner: experts in GPU memory with their ops and tactics, for routed experts, MLPs and probes.
#pragma once

#include <cstdint>

#include "base/buffer.h"
#include "kernels/device_moe.h"
#include "moe/device/device_exchange.h"
#include "moe/device/device_experts.h"
#include "moe/device/device_pass.h"
#include "moe/plan/tactics.h"

namespace fp4moe {

class DeviceExpertRunner {
 public:
  // `ops` must be for the experts' scheme and outlive the runner. `tactics` must have been timed for layers
  // of this size; if empty, the table's default rule applies.
  static Result<DeviceExpertRunner> make(const DeviceMoeOps& ops, DeviceExperts experts,
                                         DeviceTactics tactics = {});

  int64_t weight_bytes() const { return experts_.num_bytes(); }
  const DeviceExperts& experts() const { return experts_; }
  DeviceExperts& experts() { return experts_; }
  int64_t scratch_bytes(int64_t max_tokens, int64_t topk) const;
  // out [T, H] f32 (+)= the experts' weighted sums for x [T, H] bf16; weights [T, topk], null: all 1. All
  // arrays are in device memory; the work is enqueued on the current stream.
  void run_device_experts(const ActRows& x, const DeviceSlots& slots, const float* weights, float* out,
                          bool accumulate, Arena& scratch) const;
  // out [T, H] bf16 = the first expert's output for x, rounded. Returns false, and does nothing, under w4a4.
  bool run_rounded(const ActRows& x, bf16* out, Arena& scratch) const;
  // Whether the tactic for slots without slots.shared also runs slots.shared.
  bool runs_shared(const DeviceSlots& slots) const;
  // Whether slots.uncombined is allowed for slots of these sizes. It then names scratch memory that is no
  // longer taken.
  bool leaves_rows(const DeviceSlots& slots) const;
  // Waits for a round's rows, runs the experts on them (slots.ids and num_tokens are taken from the round),
  // and combines the results into out (DeviceExchange::combine). Takes up to scratch_bytes() and
  // lane_batch_bytes() for the batch, plus returned_sums_bytes(), from scratch.
  void run_on_lanes(const DeviceExchange& exchange, const A2aRound& round, DeviceSlots slots, float* out,
                    Arena& scratch) const;
  int64_t returned_sums_bytes() const;
  // The same for a direct round, before which the caller has sent the rows and after which it adds the sums.
  // num_lanes: DeviceExchange::direct_lanes().
  bool runs_direct(const A2aRound& round, int64_t num_lanes, DeviceSlots slots) const;
  void run_direct(const A2aRound& round, DeviceSlots slots, Arena& scratch) const;
  // The scalar scale with which w4a4 quantises x, [1] in device memory; null if a1 is not scalar, and in
  // other schemes.
  const float* nvfp4_scale() const;

 private:
  // w4a4 runs kernel by kernel (device_pass.h); in other schemes a tactic runs the whole layer.
  bool is_w4a4() const { return experts_.numerics().scheme == Scheme::kW4A4; }
  // The arguments that do not depend on the batch's memory.
  DeviceMoeArgs layer_sizes(const DeviceSlots& slots) const;
  DeviceMoeArgs layer_args(const ActRows& x, const DeviceSlots& slots, const float* weights,
                           Arena& scratch) const;
  DeviceMoeArgs with_memory(DeviceMoeArgs args, Arena& scratch) const;
  const DeviceMoeTactic& tactic(DeviceMoeArgs args) const;

  const DeviceMoeOps* ops_ = nullptr;
  DeviceExperts experts_;
  DeviceTactics tactics_;
  Buffer counters_;  // DeviceMoeArgs::counters
};

}  // namespace fp4moe
