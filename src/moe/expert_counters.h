// ExpertCounters: how many tokens one rank's routers have sent to each expert of each layer since load.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer.h"

namespace fp4moe {

class ExpertCounters {
 public:
  // `layers`: the model's layers that have a router, ascending. The counts are allocated in `memory`. The
  // host counts with add(); GPU routers increment on_device().
  static Result<std::unique_ptr<ExpertCounters>> make(std::vector<int64_t> layers, int64_t num_experts,
                                                      MemoryResource& memory = host_memory());

  // Counts one token for each id. Precondition: host memory, `layer` has a router, ids are in [0, E). Only
  // one thread at a time may call add(), because the increment is not atomic; any thread may read.
  void add(int64_t layer, std::span<const int32_t> ids);
  // A layer's counts [E], in `memory`.
  uint64_t* on_device(int64_t layer) const { return counts_.as<uint64_t>() + first_count(layer); }
  // sums [layers, E] += the counts. Fails if the download from the GPU fails.
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
