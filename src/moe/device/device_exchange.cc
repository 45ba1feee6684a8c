#include "moe/device/device_exchange.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "base/check.h"
#include "moe/table.h"

namespace fp4moe {

bool exchanges_rows(const MoePlan& plan) {
  return plan.problem().layout.tp > 1 &&
         (plan.problem().layout.dp > 1 || plan.a2a()->name != std::string_view("none") ||
          plan.a2a_settings().deterministic);
}

namespace {

A2aRowFormat row_format(Payload payload) {
  switch (payload) {
    case Payload::kAct:
      return A2aRowFormat::kBf16;
    case Payload::kFp8:
      return A2aRowFormat::kFp8;
    case Payload::kNvfp4:
      return A2aRowFormat::kNvfp4;
  }
  return A2aRowFormat::kBf16;
}

// A deterministic sum rounds like a single rank: to the type of the experts' outputs.
A2aResultFormat result_format(const MoePlan& plan) {
  const A2aSettings& settings = plan.a2a_settings();
  if (settings.combine_payload == CombinePayload::kFp8) return A2aResultFormat::kFp8;
  const bool is_f32 = settings.deterministic ? plan.numerics().scheme == Scheme::kW4A4
                                             : plan.a2a()->name == std::string_view("none");
  return is_f32 ? A2aResultFormat::kF32 : A2aResultFormat::kBf16;
}

}  // namespace

int64_t lane_batch_bytes(const MoePlan& plan, int64_t max_tokens) {
  if (!exchanges_rows(plan) || plan.a2a_settings().payload == Payload::kAct) return 0;
  return Arena::padded(max_tokens * plan.problem().hidden_size * 2) + Arena::padded(max_tokens * 4);
}

// A batch of lanes is at most as large as a group's batch, so that it fits in the workspace of a layer.
Result<DeviceExchangeSize> device_exchange_size(const MoePlan& plan, int64_t max_group_rows) {
  const MoeProblem& p = plan.problem();
  const RankLayout& layout = p.layout;
  const std::string_view protocol = plan.a2a()->name;
  DeviceExchangeSize size;
  size.shape = {.hidden_size = p.hidden_size,
                .top_k = p.top_k,
                .num_experts = p.num_physical(),
                .experts_per_rank = layout.ep == 1 ? 0 : p.num_physical() / layout.ep,
                .row_format = row_format(plan.a2a_settings().payload),
                .result_format = result_format(plan),
                .slots_return = protocol == "deepep" || plan.a2a_settings().deterministic,
                .is_staged = plan.spans_processes()};
  const int64_t budget = plan.a2a_settings().memory_budget;
  const auto bytes = [&](int64_t tokens) { return a2a_area(size.shape, layout.tp, tokens).num_bytes; };
  if (bytes(1) > budget)
    return does_not_fit("--a2a-memory-budget " + std::to_string(budget) + ": a2a " + std::string(protocol) +
                        " needs at least " + std::to_string(bytes(1)) +
                        " bytes per rank for one token at a time");
  const int64_t largest_share = shard_blocks(max_group_rows, 1, layout.attention_tp(), 0).count;
  int64_t least = 1, most = std::clamp<int64_t>(max_group_rows / layout.tp, 1, largest_share);
  while (least < most) {  // the largest number of tokens that fits
    const int64_t middle = (least + most + 1) / 2;
    (bytes(middle) <= budget ? least : most) = bytes(middle) <= budget ? middle : middle - 1;
  }
  size.max_tokens = least;
  size.area = a2a_area(size.shape, layout.tp, least);
  return size;
}

int64_t DeviceExchange::num_rounds(const ExchangeTokens& tokens) const {
  return (tokens.num_lane_tokens + size_.max_tokens - 1) / size_.max_tokens;
}

A2aRound DeviceExchange::round_of(const ExchangeTokens& tokens, int64_t round) const {
  const int64_t first = round * size_.max_tokens, own = std::min(first, tokens.num_own);
  FP4MOE_CHECK(first < tokens.num_lane_tokens && tokens.num_own <= tokens.num_lane_tokens,
               "the round does not exist, or num_own exceeds num_lane_tokens");
  const int64_t k = size_.shape.top_k;
  const int64_t num_tokens = std::min(size_.max_tokens, tokens.num_lane_tokens - first);
  return {.group = world_->exchange_group(),
          .op = {"dispatch", tokens.layer},
          .shape = size_.shape,
          .area = size_.area,
          .num_tokens = num_tokens,
          .num_own = std::min(num_tokens, tokens.num_own - own),
          .first_own = own,
          .num_filled = tokens.num_filled,
          .first_token = tokens.first + own,
          .ids = tokens.ids + own * k,
          .weights = tokens.weights + own * k,
          .nvfp4_scale = tokens.nvfp4_scale};
}

void DeviceExchange::send(const A2aRound& round, const ExchangeTokens& tokens) const {
  cuda_a2a_ops()->send(round, tokens.x + round.first_own * size_.shape.hidden_size);
}

int64_t DeviceExchange::direct_lanes(const A2aRound& round) const {
  const int64_t lanes = world_->size() * round.num_tokens;
  return size_.shape.allows_direct(world_->size()) && lanes <= kDirectLanes ? lanes : 0;
}

void DeviceExchange::send_direct(const A2aRound& round, const ExchangeTokens& tokens) const {
  cuda_a2a_ops()->send_direct(round, tokens.x + round.first_own * size_.shape.hidden_size);
}

void DeviceExchange::add_direct(const A2aRound& round, float* out) const {
  cuda_a2a_ops()->add_direct(returning(round), own_rows(round, out));
}

LaneBatch DeviceExchange::wait(const A2aRound& round, bool takes_nvfp4, Arena& scratch) const {
  uint8_t* const memory = round.group.regions[round.group.rank] + round.group.layout.exchange;
  const int64_t lanes = world_->size() * round.num_tokens, h = size_.shape.hidden_size;
  LaneBatch batch{.x = {memory + size_.area.rows, DType::kBF16, lanes, h},
                  .ids = reinterpret_cast<const int32_t*>(memory + size_.area.ids),
                  .weights = reinterpret_cast<const float*>(memory + size_.area.weights)};
  A2aDecoded decoded;
  if (size_.shape.row_format != A2aRowFormat::kBf16) {
    batch.x.data = decoded.rows = scratch.take<bf16>(lanes * h);
    batch.x_is_nvfp4 = decoded.keeps_nvfp4 = takes_nvfp4 && size_.shape.row_format == A2aRowFormat::kNvfp4;
    if (batch.x_is_nvfp4 && round.nvfp4_scale == nullptr)
      batch.x_row_scales = decoded.tensor_scales = scratch.take<float>(lanes);
  }
  cuda_a2a_ops()->wait(round, decoded);
  return batch;
}

A2aRound DeviceExchange::returning(const A2aRound& round) const {
  A2aRound back = round;
  back.op.name = "combine";
  return back;
}

float* DeviceExchange::own_rows(const A2aRound& round, float* out) const {
  return out + round.first_own * size_.shape.hidden_size;
}

void DeviceExchange::combine(const A2aRound& round, const A2aResults& results, float* out) const {
  cuda_a2a_ops()->combine(returning(round), results, own_rows(round, out));
}

}  // namespace fp4moe
