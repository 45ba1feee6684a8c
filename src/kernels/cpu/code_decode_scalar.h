// Decodes the 8-bit codes of a 64-byte quad (q8_panel.h) to f32, in plain C++.
#pragma once

#include "formats/e4m3.h"
#include "kernels/cpu/q8_panel.h"
#include "kernels/cpu/vec.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

struct Q8Codes {
  static float value(int code) { return static_cast<float>(code < 128 ? code : 128 - code); }
};

struct E4m3Table {
  float values[256];
};
constexpr E4m3Table make_e4m3_table() {
  E4m3Table table{};
  for (int code = 0; code < 256; ++code) table.values[code] = e4m3_decode(static_cast<uint8_t>(code));
  return table;
}
struct Fp8Codes {
  static constexpr E4m3Table kTable = make_e4m3_table();
  static float value(int code) { return kTable.values[code]; }
};

template <class Codes>
struct CodeQuad {
  const uint8_t* codes;
};
template <class Codes>
inline CodeQuad<Codes> load_quad(const uint8_t* codes) {
  return {codes};
}

template <class Codes>
inline Vec quad_column(const CodeQuad<Codes>& quad, int column) {
  return make([&](int r) { return Codes::value(quad.codes[q8_code_place(r, column)]); });
}
template <class Codes>
inline VecPair quad_floats(const CodeQuad<Codes>& quad, int i) {
  return {quad_column(quad, 2 * i), quad_column(quad, 2 * i + 1)};
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
