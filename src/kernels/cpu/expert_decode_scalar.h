// Decoding for expert_dot_f32.h, in plain C++.
#pragma once

#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/e8m0.h"
#include "kernels/cpu/expert_panel.h"
#include "kernels/cpu/vec.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

constexpr int kMaxTokens = 3;

template <Fp4Format F>
inline Vec block_scales(const uint8_t* scales) {
  return make(
      [&](int r) { return F == Fp4Format::kMxfp4 ? e8m0_decode(scales[r]) : e4m3_decode(scales[r]); });
}

// Decodes columns 8 j .. 8 j + 7 of 16 rows to w[c][r].
inline void decode_words(const uint8_t* codes, float (*w)[kPanelRows]) {
  for (int64_t r = 0; r < kPanelRows; ++r) {
    uint32_t word;
    __builtin_memcpy(&word, codes + 4 * r, 4);
    for (int i = 0; i < 4; ++i) {
      w[2 * i][r] = kE2m1Values[word >> (4 * i) & 0xf];
      w[2 * i + 1][r] = kE2m1Values[word >> (4 * i + 16) & 0xf];
    }
  }
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
