// Decodes the codes of a 64-byte quad (q8_panel.h) to f32, in plain C++.
#pragma once

#include "kernels/cpu/q8_panel.h"
#include "kernels/cpu/vec.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

struct Q8Quad {
  const uint8_t* codes;
};
inline Q8Quad load_q8_quad(const uint8_t* codes) { return {codes}; }

inline Vec q8_column(const Q8Quad& quad, int column) {
  return make([&](int r) {
    const int code = quad.codes[q8_code_place(r, column)];
    return static_cast<float>(code < 128 ? code : 128 - code);
  });
}
inline VecPair q8_floats(const Q8Quad& quad, int i) {
  return {q8_column(quad, 2 * i), q8_column(quad, 2 * i + 1)};
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
