// RoutedExperts runs the routed experts of a MoE layer on a CPU: everything between the router and the
// residual.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "io/checkpoint/expert_weights.h"
#include "moe/expert_parts.h"
#include "moe/plan/plan.h"
#include "moe/table.h"
#include "moe/transport/transport.h"

namespace fp4moe {

class RoutedExperts {
 public:
  // Packs this rank's part of the experts for the plan's CPU runner. kDoesNotFit if memory allocation fails.
  static Result<RoutedExperts> make(const MoePlan& plan, const MoeWeightsView& weights, ThreadPool& pool);

  const PackedExperts& experts() const { return experts_; }
  // Bytes that the runner takes from the arena in each of the transport's rounds.
  int64_t round_bytes(const Transport& transport) const;
  // As in PlacedExperts.
  int64_t expert_bytes() const;
  void read_expert(int64_t local, int64_t first, std::span<uint8_t> to) const;
  void write_expert(int64_t local, int64_t first, std::span<const uint8_t> from);
  // Called after transport.begin(): runs the experts on each round's rows and sends the results back. `out`
  // is passed to Transport::finish().
  Status run_experts(float* out, Transport& transport, Arena& scratch, ThreadPool& pool) const;

 private:
  std::array<ExpertPart, 5> parts_of(int64_t local) const;

  MoeProblem problem_;
  const RunnerRow* runner_ = nullptr;
  PackedExperts experts_;
};

}  // namespace fp4moe
