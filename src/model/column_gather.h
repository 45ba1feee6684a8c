// ColumnGather: gathers rows whose columns are distributed over the ranks of a group, so that all ranks have
// whole rows. It copies values without changing their bits.
#pragma once

#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "comm/communicator.h"
#include "comm/device_communicator.h"
#include "moe/plan/rank_layout.h"

namespace fp4moe {

struct GatherRows {
  int64_t rows = 0;
  const void* mine = nullptr;  // [rows, mine().count], in the group's memory: the host's or a GPU's
  void* out = nullptr;         // [rows, columns], in the same memory; must not overlap `mine`
};

class ColumnGather {
 public:
  // parts: each rank's columns. They are consecutive and cover all columns; a part may be empty. The
  // communicator must outlive this object.
  ColumnGather(Communicator& group, std::vector<Shard> parts, int64_t element_bytes);
  ColumnGather(const DeviceCommunicator& group, std::vector<Shard> parts, int64_t element_bytes);

  Shard mine() const;
  int64_t row_bytes() const;  // of a row of `out`
  int64_t scratch_bytes(int64_t max_rows) const;
  // All ranks of the group must call it with the same number of rows. An error fails the whole job. The
  // scratch memory is free again on return. On GPUs run() only enqueues the operation.
  Status run(const OpName& op, const GatherRows& rows, Arena& scratch, ThreadPool& pool) const;

 private:
  Communicator* host_group_ = nullptr;  // or device_group_
  const DeviceCommunicator* device_group_ = nullptr;
  std::vector<Shard> parts_;
  int64_t element_bytes_;
};

}  // namespace fp4moe
