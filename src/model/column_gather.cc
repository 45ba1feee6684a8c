#include "model/column_gather.h"

#include <cstring>
#include <utility>

#include "base/check.h"

namespace fp4moe {

ColumnGather::ColumnGather(Communicator& group, std::vector<Shard> parts, int64_t element_bytes)
    : host_group_(&group), parts_(std::move(parts)), element_bytes_(element_bytes) {
  FP4MOE_CHECK(std::ssize(parts_) == group.size(), "there must be one part per rank");
}
ColumnGather::ColumnGather(const DeviceCommunicator& group, std::vector<Shard> parts, int64_t element_bytes)
    : device_group_(&group), parts_(std::move(parts)), element_bytes_(element_bytes) {
  FP4MOE_CHECK(std::ssize(parts_) == group.size(), "there must be one part per rank");
}

Shard ColumnGather::mine() const {
  return parts_[static_cast<size_t>(host_group_ != nullptr ? host_group_->rank() : device_group_->rank())];
}

int64_t ColumnGather::row_bytes() const {
  return (parts_.back().first + parts_.back().count) * element_bytes_;
}

int64_t ColumnGather::scratch_bytes(int64_t max_rows) const {
  return host_group_ != nullptr ? Arena::padded(max_rows * row_bytes()) : 0;
}

Status ColumnGather::run(const OpName& op, const GatherRows& rows, Arena& scratch, ThreadPool& pool) const {
  if (device_group_ != nullptr) {
    std::vector<int64_t> first;
    for (const Shard& part : parts_) first.push_back(part.first * element_bytes_);
    first.push_back(row_bytes());
    device_group_->gather_columns({op.op, op.layer}, rows.mine, rows.rows, first, rows.out);
    return {};
  }
  const int64_t mark = scratch.used_bytes(), width = row_bytes();
  uint8_t* gathered = scratch.take<uint8_t>(rows.rows * width);  // the ranks' columns, in rank order
  std::vector<int64_t> counts;
  for (const Shard& part : parts_) counts.push_back(rows.rows * part.count * element_bytes_);
  const int64_t sizes[] = {rows.rows, width};
  FP4MOE_RETURN_IF_ERROR(
      host_group_->all_gather({op.op, op.layer, geometry_hash(sizes)}, rows.mine, counts, gathered));
  pool.run(rows.rows, [&](int64_t row, int) {
    for (const Shard& part : parts_) {
      const int64_t bytes = part.count * element_bytes_, first = part.first * element_bytes_;
      // In `gathered`, all rows of the earlier parts precede this part.
      std::memcpy(static_cast<uint8_t*>(rows.out) + row * width + first,
                  gathered + rows.rows * first + row * bytes, static_cast<size_t>(bytes));
    }
  });
  scratch.rewind(mark);
  return {};
}

}  // namespace fp4moe
