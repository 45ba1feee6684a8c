// Decodes the 8-bit codes of a 64-byte quad (q8_panel.h) to bf16 or f32, in AVX-512 with VBMI: each byte of a
// magnitude's bf16 is looked up in a 128-entry table, with an index that ignores the sign bit. An integer of
// 7 bits and an e4m3 are exact in bf16.
#pragma once

#include <immintrin.h>

#include "formats/e4m3.h"
#include "kernels/cpu/vec.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

struct CodeTable {
  alignas(64) uint8_t low[128], high[128];
};
constexpr CodeTable make_code_table(float (*value_of)(uint8_t)) {
  CodeTable table{};
  for (uint8_t magnitude = 0; magnitude < 128; ++magnitude) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, value_of(magnitude));
    table.low[magnitude] = static_cast<uint8_t>(bits >> 16);
    table.high[magnitude] = static_cast<uint8_t>(bits >> 24);
  }
  return table;
}

struct Q8Codes {
  static constexpr CodeTable kTable = make_code_table([](uint8_t code) { return static_cast<float>(code); });
};
struct Fp8Codes {
  static constexpr CodeTable kTable = make_code_table([](uint8_t code) { return e4m3_decode(code); });
};

template <class Codes>
struct CodeQuad {
  __m512i low, high;  // bytes of the values' bf16
};
template <class Codes>
inline CodeQuad<Codes> load_quad(const uint8_t* codes) {
  const auto look_up = [](const uint8_t* table, __m512i index) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
  };
  const __m512i quad = _mm512_load_si512(codes), sign = _mm512_set1_epi8(int8_t(0x80));
  // high | (quad & sign)
  return {look_up(Codes::kTable.low, quad),
          _mm512_ternarylogic_epi32(look_up(Codes::kTable.high, quad), quad, sign, 0xf8)};
}

template <class Codes>
inline __m512i quad_bf16(const CodeQuad<Codes>& quad, int i) {
  return i == 0 ? _mm512_unpacklo_epi8(quad.low, quad.high) : _mm512_unpackhi_epi8(quad.low, quad.high);
}
template <class Codes>
inline VecPair quad_floats(const CodeQuad<Codes>& quad, int i) {
  return split_pairs(quad_bf16(quad, i));
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
