#include "io/write/expert_statistics.h"

#include <algorithm>
#include <cmath>

#include "formats/e4m3.h"
#include "formats/e8m0.h"

namespace fp4moe {

void Fp4Statistics::add(const Fp4MatrixView& matrix) {
  const int64_t block_bytes = fp4_block(matrix.format) / 2;
  std::array<int64_t, 256> byte_counts = {}, scale_counts = {};
  for (int64_t row = 0; row < matrix.rows; ++row) {
    const uint8_t* codes = matrix.codes + row * matrix.code_stride_bytes;
    const uint8_t* scales = matrix.scales + row * matrix.scale_stride_bytes;
    for (int64_t block = 0; block < matrix.cols / fp4_block(matrix.format); ++block) {
      uint8_t magnitudes = 0;
      for (int64_t i = 0; i < block_bytes; ++i) {
        const uint8_t byte = codes[block * block_bytes + i];
        ++byte_counts[byte];
        magnitudes |= byte & 0x77;  // both codes in the byte without their signs
      }
      const bool zero_scale = matrix.format == Fp4Format::kNvfp4 && scales[block] == 0;
      num_zero_blocks += magnitudes == 0 || zero_scale;
      ++scale_counts[scales[block]];
      ++num_blocks;
    }
  }
  for (size_t byte = 0; byte < 256; ++byte) {
    code_counts[byte & 15] += byte_counts[byte];
    code_counts[byte >> 4] += byte_counts[byte];
    if (scale_counts[byte] == 0) continue;
    const uint8_t scale_byte = static_cast<uint8_t>(byte);
    const double scale = matrix.format == Fp4Format::kMxfp4
                             ? e8m0_decode(scale_byte)
                             : static_cast<double>(e4m3_decode(scale_byte)) * matrix.tensor_scale;
    if (scale > 0) exponent_counts[std::ilogb(scale)] += scale_counts[byte];
  }
}

int Fp4Statistics::exponent_quantile(double share) const {
  int64_t total = 0, below = 0;
  for (const auto& [exponent, count] : exponent_counts) total += count;
  for (const auto& [exponent, count] : exponent_counts) {
    below += count;
    if (static_cast<double>(below) >= share * static_cast<double>(total)) return exponent;
  }
  return 0;
}

void ExpertStatistics::add(const ExpertWeightsView& expert) {
  gate.add(expert.gate);
  up.add(expert.up);
  down.add(expert.down);
  const double a = expert.gate.tensor_scale, b = expert.up.tensor_scale;
  num_gate_up_mismatches += a != b;
  max_gate_up_ratio = std::max(max_gate_up_ratio, std::max(a, b) / std::min(a, b));
}

}  // namespace fp4moe
