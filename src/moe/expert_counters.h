// ExpertCounters: how many tokens one rank's routers have sent to each expert, layer by layer, since load.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

namespace fp4moe {

class ExpertCounters {
 public:
  ExpertCounters() = default;  // of no layer
  // `layers`: the model's layers that have a router, ascending.
  ExpertCounters(std::vector<int64_t> layers, int64_t num_experts);

  // One token more for each of the ids. Precondition: `layer` has a router, ids are in [0, E). One thread at
  // a time adds, any thread reads: a count is a plain load and store.
  void add(int64_t layer, std::span<const int32_t> ids);
  // sums [layers, E] += the counts.
  void add_to(std::span<int64_t> sums) const;

  const std::vector<int64_t>& layers() const { return layers_; }
  int64_t num_experts() const { return num_experts_; }

 private:
  std::vector<int64_t> layers_;
  std::vector<int64_t> row_of_layer_;
  int64_t num_experts_ = 0;
  std::vector<std::atomic<int64_t>> counts_;  // [layers, E]
};

}  // namespace fp4moe
