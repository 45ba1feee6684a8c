// ColumnGather: rows of which each rank of a group has some columns become whole on all of them. No sums: the
// result has the bits that the ranks put in.
#pragma once

#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "comm/communicator.h"
#include "moe/rank_layout.h"

namespace fp4moe {

struct GatherRows {
  int64_t rows = 0;
  const void* mine = nullptr;  // [rows, mine().count], in the host's memory
  void* out = nullptr;         // [rows, columns]; may not overlap mine
};

class ColumnGather {
 public:
  // parts: each rank's columns, one after the other, all of them together; a part may be empty. The
  // communicator is borrowed.
  ColumnGather(Communicator& group, std::vector<Shard> parts, int64_t element_bytes);

  Shard mine() const;
  int64_t row_bytes() const;  // of `out`
  int64_t scratch_bytes(int64_t max_rows) const;
  // All ranks of the group call it with the same number of rows; the error is the job's. The scratch is free
  // again afterwards.
  Status run(const OpName& op, const GatherRows& rows, Arena& scratch, ThreadPool& pool) const;

 private:
  Communicator& group_;
  std::vector<Shard> parts_;
  int64_t element_bytes_;
};

}  // namespace fp4moe
