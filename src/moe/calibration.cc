#include "moe/calibration.h"

#include <cmath>

namespace fp4moe {
namespace {

thread_local Calibration* current = nullptr;

}  // namespace

CalibrationScope::CalibrationScope(Calibration& calibration) : outer_(current) { current = &calibration; }
CalibrationScope::~CalibrationScope() { current = outer_; }

std::shared_ptr<ExpertAmax> new_amax(int64_t num_experts) {
  if (current == nullptr) return nullptr;
  return current->emplace_back(std::make_shared<ExpertAmax>(num_experts));
}

void take_amax(const ActRows& x, float& largest) {
  const auto take = [&](float value) {
    const float a = std::fabs(value);
    largest = a > largest ? a : largest;
  };
  const int64_t n = x.rows * x.cols;
  if (x.dtype == DType::kF32)
    for (int64_t i = 0; i < n; ++i) take(static_cast<const float*>(x.data)[i]);
  else
    for (int64_t i = 0; i < n; ++i) take(bf16_to_float(static_cast<const bf16*>(x.data)[i]));
}

}  // namespace fp4moe
