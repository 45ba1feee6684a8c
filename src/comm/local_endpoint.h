// LocalEndpoint: the endpoint of a rank in this process. It reaches the process's ranks through memory;
// MpiEndpoint adds the ranks of other processes.
#pragma once

#include "comm/endpoint.h"
#include "comm/rank_memory.h"

namespace fp4moe {

class LocalEndpoint : public Endpoint {
 public:
  // `memory` must contain `rank` and outlive the endpoint.
  LocalEndpoint(RankMemory& memory, int rank) : memory_(memory), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return memory_.shape().num_ranks; }
  uint8_t* heap() const override { return memory_.heap(rank_); }
  int64_t heap_bytes() const override { return memory_.shape().heap_bytes; }
  Status put(int dst, int64_t offset, const void* src, int64_t num_bytes) override;
  Status signal(int dst, int slot, uint32_t value) override;
  Status wait(int src, int slot, uint32_t value, std::chrono::nanoseconds timeout, uint32_t* seen) override {
    return memory_.wait(rank_, src, slot, value, timeout, seen);
  }
  void fail(const Status& status) override { memory_.fail(status); }
  Status failure() const override { return memory_.failure(); }
  bool shares_addresses() const override {
    return memory_.shape().num_local_ranks == memory_.shape().num_ranks;
  }
  int waits_for(int rank) const override { return memory_.waits_for(rank); }

 protected:
  // Abort the process if an argument of put() or signal() is invalid.
  void check_put(int dst, int64_t offset, int64_t num_bytes) const;
  void check_signal(int dst, int slot) const;

  RankMemory& memory_;
  const int rank_;
};

}  // namespace fp4moe
