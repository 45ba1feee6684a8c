// PlacedExperts: the experts of one layer on one rank, which move between the ranks by load.
#pragma once

#include <cstdint>
#include <span>

#include "moe/placement/expert_placement.h"

namespace fp4moe {

// All calls are made between forward passes.
class PlacedExperts {
 public:
  virtual ~PlacedExperts() = default;
  virtual const ExpertPlacement& placement() const = 0;
  // Later passes send rows to the ranks that have their experts according to `placement`, which has the shape
  // of the old one.
  virtual Status set_placement(ExpertPlacement placement) = 0;
  // Bytes of one packed expert, the same on all ranks.
  virtual int64_t expert_bytes() const = 0;
  // Copy bytes from `first` on of this rank's expert number `local` (from 0) to or from other memory: on a
  // CPU, host memory; on a GPU, memory to which this GPU has access, on the current stream. The copies run in
  // the order of the calls and are complete after finish_copies().
  virtual Status read_expert(int64_t local, int64_t first, std::span<uint8_t> to) const = 0;
  virtual Status write_expert(int64_t local, int64_t first, std::span<const uint8_t> from) = 0;
  virtual Status finish_copies() = 0;
};

}  // namespace fp4moe
