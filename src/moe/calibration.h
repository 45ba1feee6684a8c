// Calibration: the largest activations that bf16 experts and MLPs saw, which NVFP4's input scales are made
// of.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/ops.h"

namespace fp4moe {

// Of the experts of one layer, or of one MLP: |x| at most, [L].
struct ExpertAmax {
  std::vector<float> input;         // of gate and up
  std::vector<float> intermediate;  // of down

  explicit ExpertAmax(int64_t num_experts)
      : input(static_cast<size_t>(num_experts)), intermediate(static_cast<size_t>(num_experts)) {}
};

// max(largest, |x| of all elements); NaNs do not count.
void take_amax(const ActRows& x, float& largest);

// What the layers that were packed in a CalibrationScope record, in the order in which they were packed. A
// forward pass writes them; nobody reads meanwhile.
using Calibration = std::vector<std::shared_ptr<ExpertAmax>>;

// While it lives, what this thread packs is recorded in `calibration`.
class CalibrationScope {
 public:
  explicit CalibrationScope(Calibration& calibration);
  ~CalibrationScope();
  CalibrationScope(const CalibrationScope&) = delete;
  CalibrationScope& operator=(const CalibrationScope&) = delete;

 private:
  Calibration* const outer_;
};

// A record of the thread's scope; null without one: then nobody wants it.
std::shared_ptr<ExpertAmax> new_amax(int64_t num_experts);

}  // namespace fp4moe
