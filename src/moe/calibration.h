// Calibration: the largest activations of bf16 experts and MLPs, from which NVFP4 input scales are derived.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/ops.h"

namespace fp4moe {

// max |x| per expert of one layer [L], or of one MLP [1].
struct ExpertAmax {
  std::vector<float> input;         // input of gate and up
  std::vector<float> intermediate;  // input of down

  explicit ExpertAmax(int64_t num_experts)
      : input(static_cast<size_t>(num_experts)), intermediate(static_cast<size_t>(num_experts)) {}
};

// largest = max(largest, |x| of all elements), ignoring NaNs.
void take_amax(const ActRows& x, float& largest);

// Records of the layers that were packed in a CalibrationScope, in packing order. A forward pass writes them
// without synchronisation: do not read them while one runs.
using Calibration = std::vector<std::shared_ptr<ExpertAmax>>;

// Thread-local: layers that this thread packs during the scope's lifetime add their records to `calibration`.
class CalibrationScope {
 public:
  explicit CalibrationScope(Calibration& calibration);
  ~CalibrationScope();
  CalibrationScope(const CalibrationScope&) = delete;
  CalibrationScope& operator=(const CalibrationScope&) = delete;

 private:
  Calibration* const outer_;
};

// Adds a record to the calling thread's scope and returns it; returns null outside a scope.
std::shared_ptr<ExpertAmax> new_amax(int64_t num_experts);

}  // namespace fp4moe
