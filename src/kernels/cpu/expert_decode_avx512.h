// Decoding shared by the bf16 and int8 expert_dot in AVX-512.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/e4m3_decode_avx512.h"
#include "kernels/cpu/expert_panel.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

constexpr int kMaxTokens = 12;           // 12 sums and 12 totals leave 8 of 32 registers
constexpr int kPrefetchBytes = 8 << 10;  // 2 KiB is too short, 16 KiB is no better

template <Fp4Format F>
inline __m512 block_scales(const uint8_t* scales) {
  const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(scales));
  if constexpr (F == Fp4Format::kMxfp4) {
    // The byte is the exponent field; byte 0 is the subnormal 2^-127.
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23);
    return _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(0x00400000)));
  } else {
    return finite_e4m3(bytes);
  }
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
