// Vec: sixteen f32 lanes, the CPU kernels' only vector type on every ISA. Included only by sources that are
// compiled per ISA; everything is in the ISA's own namespace, so that the linker can never use AVX-512 code
// for another ISA.
//
//   zero() broadcast(x) load(p) store(p, v)                     p: float* or bf16*
//   load_partial(p, n) store_partial(p, v, n)                   the first min(n, 16) lanes; others load as 0
//   add sub mul div max min(a, b)   fma(a, b, c) = a b + c (one rounding, two in scalar)
//   sum(v) largest(v)       over the lanes, in a fixed tree
//   load_pairs(p)           32 bf16 -> the 16 even and the 16 odd elements
//   transpose(rows)         16 x 16 in place
//   and_bits(v, mask) or_bits(a, b)               of the lanes' bit patterns
//   store_int8_eights(p, v) 16 integers in [-128, 127] as bytes, every eight in the order 0 4 1 5 2 6 3 7
//   min round scale_by_power_of_2 zero_below used by exp() below
#pragma once

#include <stdint.h>

#include "formats/bf16.h"

namespace fp4moe::FP4MOE_ISA {

constexpr int kLanes = 16;

// Duplicates formats/bf16.h's decoder: inline functions of other namespaces must not be used here.
inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16); }

}  // namespace fp4moe::FP4MOE_ISA

#if defined(__AVX512BF16__)
#include "kernels/cpu/vec_avx512.h"
#elif defined(__AVX2__)
#include "kernels/cpu/vec_avx2.h"
#else
#include "kernels/cpu/vec_scalar.h"
#endif

namespace fp4moe::FP4MOE_ISA {

// Returns e^x with a relative error below 2.5e-7 for -87 <= x <= 88.7; 0 below that range, e^88.7 above it;
// NaN stays NaN. x = n ln 2 + r, |r| <= ln 2 / 2; the Taylor polynomial of degree 7 leaves |r|^8 / 8! < 6e-9.
inline Vec exp(Vec x) {
  const Vec clamped = min(broadcast(88.7f), x);
  const Vec n = round(mul(clamped, broadcast(1.44269504f)));
  // ln 2 in two parts; n times the first, which has 10 significant bits, is exact.
  Vec r = fma(n, broadcast(-0.693359375f), clamped);
  r = fma(n, broadcast(2.12194440e-4f), r);
  constexpr float kTaylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  Vec p = broadcast(1.0f / 5040);
  for (float coefficient : kTaylor) p = fma(p, r, broadcast(coefficient));
  return zero_below(x, -87.0f, scale_by_power_of_2(p, n));
}

// Returns x * sigmoid(z).
inline Vec times_sigmoid(Vec x, Vec z) { return div(x, add(broadcast(1.0f), exp(sub(zero(), z)))); }

}  // namespace fp4moe::FP4MOE_ISA
