// NcclPlane: the plane of a group of consecutive ranks of a job, one process each (kernels/group_plane.h).
#pragma once

#include <span>
#include <vector>

#include "comm/nccl_comm.h"
#include "device/stream.h"
#include "kernels/group_plane.h"

namespace fp4moe {

class NcclPlane final : public GroupPlane {
 public:
  // `comm` has all ranks of the job; first_rank is the group's first. It must outlive the plane.
  NcclPlane(NcclComm& comm, int first_rank) : comm_(comm), first_rank_(first_rank) {}

  // The current stream keeps an error.
  void exchange(const CommOp& op, std::span<const PlaneTransfer> transfers) const override {
    std::vector<PlaneTransfer> of_job(transfers.begin(), transfers.end());
    for (PlaneTransfer& transfer : of_job) transfer.peer += first_rank_;
    const Status status = comm_.exchange(op, of_job, current_stream().handle());
    if (!status.ok()) current_stream().keep(status);
  }
  Status failure() const override { return comm_.failure(); }

 private:
  NcclComm& comm_;
  const int first_rank_;
};

}  // namespace fp4moe
