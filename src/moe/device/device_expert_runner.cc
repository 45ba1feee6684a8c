#include "moe/device/device_expert_runner.h"

#include <optional>
#include <vector>

#include "base/check.h"
#include "device/device_memory.h"

namespace fp4moe {
namespace {

constexpr int64_t kMostSummedTokens = 16;  // at least 8, the most that few_tokens accepts

}  // namespace

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

DeviceMoeArgs DeviceExpertRunner::layer_sizes(const DeviceSlots& slots) const {
  return {.experts = experts_.tiles(),
          .ids = slots.ids,
          .num_tokens = slots.num_tokens,
          .topk = slots.topk,
          .first_expert = slots.first_expert,
          .num_routed_experts = slots.num_routed_experts,
          .shared = slots.shared,
          .uncombined = slots.uncombined,
          .added = slots.added,
          .next = slots.next};
}

DeviceMoeArgs DeviceExpertRunner::layer_args(const ActRows& x, const DeviceSlots& slots, const float* weights,
                                             Arena& scratch) const {
  DeviceMoeArgs args = with_memory(layer_sizes(slots), scratch);
  args.x = static_cast<const bf16*>(x.data);
  args.weights = weights;
  return args;
}

DeviceMoeArgs DeviceExpertRunner::with_memory(DeviceMoeArgs args, Arena& scratch) const {
  args.counters = counters_.data();
  const int64_t topk = args.topk + (args.shared.is_tiled() ? 1 : 0);  // its rows are like the others'
  args.workspace =
      scratch.take<uint8_t>(layer_workspace_bytes(*ops_, experts_.tiles(), args.num_tokens, topk));
  return args;
}

bool DeviceExpertRunner::runs_shared(const DeviceSlots& slots) const {
  if (is_w4a4()) return false;
  const DeviceMoeArgs sizes = layer_sizes(slots);
  return tactic(sizes).fits(sizes);
}

bool DeviceExpertRunner::leaves_rows(const DeviceSlots& slots) const {
  return !is_w4a4() && tactic(layer_sizes(slots)).leaves_rows;
}

// Returns the tactic timed as fastest if it fits these arguments, else the default tactic. A shared expert
// does not change the choice.
const DeviceMoeTactic& DeviceExpertRunner::tactic(DeviceMoeArgs args) const {
  args.shared = {};
  if (const std::optional<size_t> timed = tactics_.of(args.num_tokens); timed.has_value())
    if (const DeviceMoeTactic& found = ops_->tactics[*timed]; found.fits(args)) return found;
  return ops_->tactics[ops_->default_tactic(args)];
}

void DeviceExpertRunner::run_device_experts(const ActRows& x, const DeviceSlots& slots, const float* weights,
                                            float* out, bool accumulate, Arena& scratch) const {
  FP4MOE_CHECK(slots.uncombined == nullptr || (out == nullptr && leaves_rows(slots)),
               "the layer combines its rows itself");
  const TiledExperts& t = experts_.tiles();
  const int64_t mark = scratch.used_bytes();
  if (!is_w4a4()) {
    DeviceMoeArgs args = layer_args(x, slots, weights, scratch);
    args.out = out;
    args.accumulate = accumulate;
    args.send = slots.send;
    tactic(args).layer(args);
  } else {
    const DeviceRows rows = sort_rows(*ops_, slots, t.num_experts, scratch);
    ops_->combine({.y = quantised_pass(*ops_, experts_, slots, rows, {.x = x}, scratch),
                   .row_of_slot = rows.row_of_slot,
                   .weights = weights,
                   .num_tokens = slots.num_tokens,
                   .topk = slots.topk,
                   .hidden_size = t.hidden_size,
                   .out = out,
                   .accumulate = accumulate,
                   .added = slots.added});
  }
  scratch.rewind(mark);
}

bool DeviceExpertRunner::run_rounded(const ActRows& x, bf16* out, Arena& scratch) const {
  if (is_w4a4()) return false;
  const int64_t mark = scratch.used_bytes();
  DeviceMoeArgs args = layer_args(x, {nullptr, x.rows}, nullptr, scratch);
  args.out_bf16 = out;
  tactic(args).layer(args);
  scratch.rewind(mark);
  return true;
}

int64_t DeviceExpertRunner::returned_sums_bytes() const {
  return Arena::padded(kMostSummedTokens * experts_.tiles().hidden_size * 4);
}

const float* DeviceExpertRunner::nvfp4_scale() const {
  return is_w4a4() && experts_.numerics().a1 == ActScaleChoice::kScalar ? experts_.a1() : nullptr;
}

bool DeviceExpertRunner::runs_direct(const A2aRound& round, int64_t num_lanes, DeviceSlots slots) const {
  if (num_lanes == 0 || is_w4a4() || ops_->direct == nullptr) return false;
  slots.num_tokens = num_lanes;
  DeviceMoeArgs args = layer_sizes(slots);
  args.direct = &round;
  return ops_->direct_fits(args);
}

void DeviceExpertRunner::run_direct(const A2aRound& round, DeviceSlots slots, Arena& scratch) const {
  const int64_t mark = scratch.used_bytes();
  slots.num_tokens = round.group.size * round.num_tokens;
  DeviceMoeArgs args = with_memory(layer_sizes(slots), scratch);
  args.direct = &round;
  ops_->direct(args);
  scratch.rewind(mark);
}

void DeviceExpertRunner::run_on_lanes(const DeviceExchange& exchange, const A2aRound& round,
                                      DeviceSlots slots, float* out, Arena& scratch) const {
  const int64_t mark = scratch.used_bytes();
  const LaneBatch batch = exchange.wait(round, is_w4a4(), scratch);
  slots.ids = batch.ids;
  slots.num_tokens = batch.x.rows;
  if (is_w4a4()) {
    const DeviceRows rows = sort_rows(*ops_, slots, experts_.tiles().num_experts, scratch);
    const float* y = quantised_pass(*ops_, experts_, slots, rows,
                                    {batch.x, batch.x_is_nvfp4, batch.x_row_scales}, scratch);
    exchange.combine(round, {.y = y, .row_of_slot = rows.row_of_slot}, out);
  } else {
    DeviceMoeArgs args = layer_args(batch.x, slots, batch.weights, scratch);
    const A2aRound back = exchange.returning(round);
    const DeviceMoeTactic* chosen = &tactic(args);
    args.exchange = &back;
    args.out = exchange.own_rows(round, out);
    // A tactic that cannot combine first writes the weighted sums of its few tokens; combine() then returns
    // the sums.
    const bool sums_first =
        !chosen->fits(args) && !exchange.shape().slots_return && slots.num_tokens <= kMostSummedTokens;
    if (sums_first) {
      args.exchange = nullptr;
      args.out = scratch.take<float>(slots.num_tokens * batch.x.cols);
      chosen->layer(args);
      exchange.combine(round, {.sums = args.out}, out);
    } else {
      tactic(args).layer(args);
    }
  }
  scratch.rewind(mark);
}

}  // namespace fp4moe
