// MpiEndpoint: the endpoint of a rank in one of several processes.
#pragma once

#include "comm/local_endpoint.h"
#include "comm/mpi_link.h"

namespace fp4moe {

// `memory` and `link` are this process's and must outlive the endpoint.
class MpiEndpoint : public LocalEndpoint {
 public:
  MpiEndpoint(RankMemory& memory, MpiLink& link, int rank) : LocalEndpoint(memory, rank), link_(link) {}
  Status put(int dst, int64_t offset, const void* src, int64_t num_bytes) override {
    if (memory_.is_local(dst)) return LocalEndpoint::put(dst, offset, src, num_bytes);
    check_put(dst, offset, num_bytes);
    return link_.put(rank_, dst, offset, src, num_bytes);
  }
  Status signal(int dst, int slot, uint32_t value) override {
    if (memory_.is_local(dst)) return LocalEndpoint::signal(dst, slot, value);
    check_signal(dst, slot);
    return link_.signal(rank_, dst, slot, value);
  }
  void fail(const Status& status) override { link_.fail(status); }

 private:
  MpiLink& link_;
};

}  // namespace fp4moe
