// ExpertCounters: how many tokens one rank's routers have sent to each expert, layer by layer, since load.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer.h"

namespace fp4moe {

class ExpertCounters {
 public:
  // `layers`: the model's layers that have a router, ascending. The counts lie in `memory`: the host adds
  // with add(), a GPU's routers where on_device() says.
  static Result<std::unique_ptr<ExpertCounters>> make(std::vector<int64_t> layers, int64_t num_experts,
                                                      MemoryResource& memory = host_memory());

  // One token more for each of the ids. Precondition: host memory, `layer` has a router, ids are in [0, E).
  // One thread at a time adds, any thread reads: a count is a plain load and store.
  void add(int64_t layer, std::span<const int32_t> ids);
  // A layer's counts [E], of `memory`.
  uint64_t* on_device(int64_t layer) const { return counts_.as<uint64_t>() + first_count(layer); }
  // sums [layers, E] += the counts; the error is the GPU's.
  Status add_to(std::span<int64_t> sums) const;

  const std::vector<int64_t>& layers() const { return layers_; }
  int64_t num_experts() const { return num_experts_; }

 private:
  ExpertCounters(std::vector<int64_t> layers, int64_t num_experts, MemoryResource& memory);
  int64_t first_count(int64_t layer) const;

  std::vector<int64_t> layers_;
  std::vector<int64_t> row_of_layer_;
  int64_t num_experts_ = 0;
  MemoryResource& memory_;
  Buffer counts_;  // [layers, E] uint64
};

}  // namespace fp4moe
