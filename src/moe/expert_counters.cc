#include "moe/expert_counters.h"

#include <utility>

#include "base/check.h"

namespace fp4moe {

ExpertCounters::ExpertCounters(std::vector<int64_t> layers, int64_t num_experts)
    : layers_(std::move(layers)),
      row_of_layer_(layers_.empty() ? 0 : static_cast<size_t>(layers_.back() + 1), -1),
      num_experts_(num_experts),
      counts_(layers_.size() * static_cast<size_t>(num_experts)) {
  for (size_t row = 0; row < layers_.size(); ++row)
    row_of_layer_[static_cast<size_t>(layers_[row])] = static_cast<int64_t>(row);
}

void ExpertCounters::add(int64_t layer, std::span<const int32_t> ids) {
  FP4MOE_CHECK(
      layer >= 0 && layer < std::ssize(row_of_layer_) && row_of_layer_[static_cast<size_t>(layer)] >= 0,
      "layer " + std::to_string(layer) + " has no router");
  auto* counts = counts_.data() + row_of_layer_[static_cast<size_t>(layer)] * num_experts_;
  for (const int32_t id : ids)
    counts[id].store(counts[id].load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

void ExpertCounters::add_to(std::span<int64_t> sums) const {
  FP4MOE_CHECK(sums.size() == counts_.size(), "room for other counts");
  for (size_t i = 0; i < counts_.size(); ++i) sums[i] += counts_[i].load(std::memory_order_relaxed);
}

}  // namespace fp4moe
