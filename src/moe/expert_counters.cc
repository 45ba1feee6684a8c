#include "moe/expert_counters.h"

#include <atomic>
#include <string>
#include <utility>

#include "base/check.h"

namespace fp4moe {

ExpertCounters::ExpertCounters(std::vector<int64_t> layers, int64_t num_experts, MemoryResource& memory)
    : layers_(std::move(layers)),
      row_of_layer_(layers_.empty() ? 0 : static_cast<size_t>(layers_.back() + 1), -1),
      num_experts_(num_experts),
      memory_(memory) {
  for (size_t row = 0; row < layers_.size(); ++row)
    row_of_layer_[static_cast<size_t>(layers_[row])] = static_cast<int64_t>(row);
}

Result<std::unique_ptr<ExpertCounters>> ExpertCounters::make(std::vector<int64_t> layers, int64_t num_experts,
                                                             MemoryResource& memory) {
  const std::vector<uint64_t> zeros(layers.size() * static_cast<size_t>(num_experts));
  std::unique_ptr<ExpertCounters> counters(new ExpertCounters(std::move(layers), num_experts, memory));
  FP4MOE_ASSIGN_OR_RETURN(
      counters->counts_,
      Buffer::copy_of(zeros.data(), static_cast<int64_t>(zeros.size() * sizeof(uint64_t)), memory));
  return counters;
}

int64_t ExpertCounters::first_count(int64_t layer) const {
  FP4MOE_CHECK(
      layer >= 0 && layer < std::ssize(row_of_layer_) && row_of_layer_[static_cast<size_t>(layer)] >= 0,
      "layer " + std::to_string(layer) + " has no router");
  return row_of_layer_[static_cast<size_t>(layer)] * num_experts_;
}

void ExpertCounters::add(int64_t layer, std::span<const int32_t> ids) {
  uint64_t* counts = counts_.as<uint64_t>() + first_count(layer);
  for (const int32_t id : ids) {
    const std::atomic_ref<uint64_t> count(counts[id]);
    count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
}

Status ExpertCounters::add_to(std::span<int64_t> sums) const {
  FP4MOE_CHECK(static_cast<int64_t>(sums.size_bytes()) == counts_.num_bytes(),
               "sums do not match the size of the counts");
  uint64_t* counts = counts_.as<uint64_t>();
  std::vector<uint64_t> copy;
  if (!memory_.is_host()) {
    copy.resize(sums.size());
    counts = copy.data();
    FP4MOE_RETURN_IF_ERROR(memory_.download(counts, counts_.data(), counts_.num_bytes()));
  }
  for (size_t i = 0; i < sums.size(); ++i)
    sums[i] += static_cast<int64_t>(std::atomic_ref<uint64_t>(counts[i]).load(std::memory_order_relaxed));
  return {};
}

}  // namespace fp4moe
