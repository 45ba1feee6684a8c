// Decoding of e4m3 codes in plain C++.
#pragma once

#include "formats/e4m3.h"
#include "kernels/cpu/vec.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

// Loads the first min(n, 16) codes; the other lanes are 0. NaN codes become NaN.
inline Vec load_e4m3(const uint8_t* p, int64_t n) {
  return make([=](int i) { return i < n ? e4m3_decode(p[i]) : 0.0f; });
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
