#include "moe/device/device_expert_runner.h"

#include <vector>

#include "base/check.h"
#include "device/device_memory.h"

namespace fp4moe {

Result<DeviceExpertRunner> DeviceExpertRunner::make(const DeviceMoeOps& ops, DeviceExperts experts,
                                                    DeviceTactics tactics) {
  DeviceExpertRunner runner;
  runner.ops_ = &ops;
  runner.experts_ = std::move(experts);
  runner.tactics_ = std::move(tactics);
  const std::vector<uint8_t> zeros(kMoeCounterBytes);
  FP4MOE_ASSIGN_OR_RETURN(runner.counters_, Buffer::copy_of(zeros.data(), kMoeCounterBytes, device_memory()));
  return runner;
}

int64_t DeviceExpertRunner::scratch_bytes(int64_t max_tokens, int64_t topk) const {
  const TiledExperts& t = experts_.tiles();
  if (!is_w4a4()) return Arena::padded(layer_workspace_bytes(*ops_, t, max_tokens, topk));
  return device_rows_bytes(max_tokens * topk, t.num_experts) +
         quantised_pass_bytes(experts_, max_tokens, topk);
}

void DeviceExpertRunner::run_device_experts(const ActRows& x, const DeviceSlots& slots, const float* weights,
                                            float* out, bool accumulate, Arena& scratch) const {
  const TiledExperts& t = experts_.tiles();
  const int64_t mark = scratch.used_bytes();
  if (!is_w4a4()) {
    DeviceMoeArgs args{.experts = t,
                       .x = static_cast<const bf16*>(x.data),
                       .ids = slots.ids,
                       .weights = weights,
                       .num_tokens = slots.num_tokens,
                       .topk = slots.topk,
                       .first_expert = slots.first_expert,
                       .out = out,
                       .accumulate = accumulate,
                       .counters = counters_.data()};
    args.workspace = scratch.take<uint8_t>(layer_workspace_bytes(*ops_, t, slots.num_tokens, slots.topk));
    ops_->tactics[tactics_.of(slots.num_tokens).value_or(ops_->default_tactic(args))].layer(args);
  } else {
    const DeviceRows rows = sort_rows(*ops_, slots, t.num_experts, scratch);
    ops_->combine({.y = quantised_pass(*ops_, experts_, slots, rows, x, scratch),
                   .row_of_slot = rows.row_of_slot,
                   .weights = weights,
                   .num_tokens = slots.num_tokens,
                   .topk = slots.topk,
                   .hidden_size = t.hidden_size,
                   .out = out,
                   .accumulate = accumulate});
  }
  scratch.rewind(mark);
}

}  // namespace fp4moe
