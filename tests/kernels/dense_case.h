// Shared by the dense op tests: the tables, deterministic data, and rows of either activation type.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "formats/bf16.h"
#include "kernels/ops.h"

namespace fp4moe {

constexpr double kF32Eps = 0x1p-24, kBf16Eps = 0x1p-8;  // half a unit in the last place of 1

// Returns the CPU tables that this machine supports; the best one is last.
inline std::vector<const DenseOps*> cpu_tables(DenseQuant quant = DenseQuant::kNone) {
  std::vector<const DenseOps*> tables;
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAmx})
    if (isa_available(isa)) tables.push_back(&cpu_dense_ops(isa, quant));
  return tables;
}

class Random {
 public:
  explicit Random(uint64_t seed) : generator_(seed) {}
  int64_t integer(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(generator_);
  }
  std::vector<float> normal(int64_t n, float scale = 1) {
    std::normal_distribution<float> distribution(0, scale);
    std::vector<float> values(static_cast<size_t>(n));
    for (float& v : values) v = distribution(generator_);
    return values;
  }

 private:
  std::mt19937_64 generator_;
};

inline std::vector<bf16> to_bf16(const std::vector<float>& values) {
  std::vector<bf16> rounded;
  for (float v : values) rounded.push_back(float_to_bf16(v));
  return rounded;
}

inline std::vector<float> to_float(const std::vector<bf16>& values) {
  std::vector<float> widened;
  for (bf16 v : values) widened.push_back(bf16_to_float(v));
  return widened;
}

// Owns [rows, cols] of `dtype`.
class ActBuffer {
 public:
  ActBuffer(DType dtype, int64_t rows, int64_t cols, const std::vector<float>& values = {})
      : dtype_(dtype), rows_(rows), cols_(cols), f32_(static_cast<size_t>(rows * cols)), bf16_(f32_.size()) {
    for (size_t i = 0; i < values.size(); ++i) f32_[i] = values[i], bf16_[i] = float_to_bf16(values[i]);
  }
  ActRows view() {
    return {dtype_ == DType::kF32 ? static_cast<void*>(f32_.data()) : bf16_.data(), dtype_, rows_, cols_};
  }
  std::vector<float> values() const { return dtype_ == DType::kF32 ? f32_ : to_float(bf16_); }

 private:
  DType dtype_;
  int64_t rows_, cols_;
  std::vector<float> f32_;
  std::vector<bf16> bf16_;
};

}  // namespace fp4moe
