#include "moe/routed_experts.h"

#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "base/check.h"

namespace fp4moe {

Result<RoutedExperts> RoutedExperts::make(const MoePlan& plan, const MoeWeightsView& weights,
                                          ThreadPool& pool) {
  RoutedExperts routed;
  routed.problem_ = plan.problem();
  routed.runner_ = plan.runner();
  FP4MOE_ASSIGN_OR_RETURN(
      routed.experts_, routed.runner_->pack(*routed.runner_, plan.problem(), plan.numerics(), weights, pool));
  routed.experts_.tactics = plan.tactics();
  return routed;
}

int64_t RoutedExperts::round_bytes(const Transport& transport) const {
  return runner_->scratch_bytes(problem_, experts_.numerics, transport.max_batch_rows());
}

// Every array of PackedExperts is an array of L equal parts.
std::array<ExpertPart, 5> RoutedExperts::parts_of(int64_t local) const {
  const PackedExperts& e = experts_;
  const int64_t count = problem_.local_experts().count;
  const auto part = [&](const void* data, int64_t num_bytes) {
    FP4MOE_CHECK(num_bytes % count == 0,
                 std::to_string(num_bytes) + " bytes of " + std::to_string(count) + " experts");
    const int64_t each = num_bytes / count;
    return ExpertPart{static_cast<uint8_t*>(const_cast<void*>(data)) + local * each, each};
  };
  const auto floats = [&](const std::vector<float>& values) {
    return part(values.data(), std::ssize(values) * int64_t{sizeof(float)});
  };
  return {part(e.gate_up.data(), e.gate_up.num_bytes()), part(e.down.data(), e.down.num_bytes()),
          floats(e.gate_up_bias), floats(e.down_bias),
          part(e.scales.data(), std::ssize(e.scales) * int64_t{sizeof(ExpertScales)})};
}

int64_t RoutedExperts::expert_bytes() const {
  int64_t sum = 0;
  for (const ExpertPart& part : parts_of(0)) sum += part.num_bytes;
  return sum;
}

void RoutedExperts::read_expert(int64_t local, int64_t first, std::span<uint8_t> to) const {
  for_expert_pieces(parts_of(local), first, std::ssize(to),
                    [&](const uint8_t* data, int64_t offset, int64_t num_bytes) {
                      std::memcpy(to.data() + offset, data, static_cast<size_t>(num_bytes));
                    });
}

void RoutedExperts::write_expert(int64_t local, int64_t first, std::span<const uint8_t> from) {
  static_assert(std::is_trivially_copyable_v<ExpertScales>);
  for_expert_pieces(parts_of(local), first, std::ssize(from),
                    [&](uint8_t* data, int64_t offset, int64_t num_bytes) {
                      std::memcpy(data, from.data() + offset, static_cast<size_t>(num_bytes));
                    });
}

Status RoutedExperts::run_experts(float* out, Transport& transport, Arena& scratch, ThreadPool& pool) const {
  const int64_t before_rounds = scratch.used_bytes();
  for (;;) {
    ExpertBatch batch;
    FP4MOE_ASSIGN_OR_RETURN(const bool more, transport.next(batch, scratch, pool));
    if (!more) break;
    runner_->run(*runner_, {problem_, experts_, batch}, scratch, pool);
    FP4MOE_RETURN_IF_ERROR(transport.combine(batch, scratch, pool));
    scratch.rewind(before_rounds);
  }
  return transport.finish(out, pool);
}

}  // namespace fp4moe
