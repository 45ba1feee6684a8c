// Decodes the codes of a 64-byte quad (q8_panel.h) to bf16 or f32, in AVX-512 with VBMI: each byte of a
// magnitude's bf16 is looked up in a 128-entry table, with an index that ignores the sign bit. An integer of
// 7 bits is exact in bf16.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/vec.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

struct Q8Table {
  alignas(64) uint8_t low[128], high[128];
};
constexpr Q8Table make_q8_table() {
  Q8Table table{};
  for (int magnitude = 0; magnitude < 128; ++magnitude) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, static_cast<float>(magnitude));
    table.low[magnitude] = static_cast<uint8_t>(bits >> 16);
    table.high[magnitude] = static_cast<uint8_t>(bits >> 24);
  }
  return table;
}
constexpr Q8Table kQ8Table = make_q8_table();

struct Q8Quad {
  __m512i low, high;  // bytes of the values' bf16
};
inline Q8Quad load_q8_quad(const uint8_t* codes) {
  const auto look_up = [](const uint8_t* table, __m512i index) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
  };
  const __m512i quad = _mm512_load_si512(codes), sign = _mm512_set1_epi8(int8_t(0x80));
  // high | (quad & sign)
  return {look_up(kQ8Table.low, quad),
          _mm512_ternarylogic_epi32(look_up(kQ8Table.high, quad), quad, sign, 0xf8)};
}

inline __m512i q8_bf16(const Q8Quad& quad, int i) {
  return i == 0 ? _mm512_unpacklo_epi8(quad.low, quad.high) : _mm512_unpackhi_epi8(quad.low, quad.high);
}
inline VecPair q8_floats(const Q8Quad& quad, int i) { return split_pairs(q8_bf16(quad, i)); }

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
