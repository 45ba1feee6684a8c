// PlacedExperts: the experts of one layer on one rank, which move between the ranks by load.
#pragma once

#include <cstdint>

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
  // Copies this rank's expert number `local` (from 0) to or from host memory.
  virtual Status read_expert(int64_t local, uint8_t* to) const = 0;
  virtual Status write_expert(int64_t local, const uint8_t* from) = 0;
};

}  // namespace fp4moe
