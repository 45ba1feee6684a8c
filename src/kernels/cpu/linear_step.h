// The innermost step of a linear op, for rows of either dtype and weights in either layout: multiplies two
// adjacent elements of x, k and k + 1, each broadcast, by the weights of 16 outputs at k and k + 1, and adds
// the products to the 16 sums.
//
//   load_weights(w)        32 bf16 of LinearLayout::kPanel16
//   pair(quad, i)          the unscaled weights at k = 4 j + 2 i and k + 1, from quad j (load_quad())
#pragma once

#include "kernels/cpu/vec.h"

#if defined(__AVX512BF16__)
#include "kernels/cpu/code_decode_avx512.h"
#elif defined(__AVX2__)
#include "kernels/cpu/code_decode_avx2.h"
#else
#include "kernels/cpu/code_decode_scalar.h"
#endif

namespace fp4moe::FP4MOE_ISA {
namespace {

template <class T>
struct FmaStep {
  using X = T;
  using Weights = VecPair;
  static Weights load_weights(const bf16* w) { return load_pairs(w); }
  template <class Codes>
  static Weights pair(const CodeQuad<Codes>& quad, int i) {
    return quad_floats(quad, i);
  }
  static VecPair two(const X* x) { return {broadcast(to_float(x[0])), broadcast(to_float(x[1]))}; }
  static Vec add_two(Vec sum, VecPair x, Weights w) { return fma(x.odd, w.odd, fma(x.even, w.even, sum)); }
  static Vec add_last(Vec sum, const X* x, Weights w) { return fma(broadcast(to_float(*x)), w.even, sum); }
};

#if defined(__AVX512BF16__)
struct Bf16Step {
  using X = bf16;
  using Weights = __m512bh;
  static Weights load_weights(const bf16* w) { return (__m512bh)_mm512_loadu_si512(w); }
  template <class Codes>
  static Weights pair(const CodeQuad<Codes>& quad, int i) {
    return (__m512bh)quad_bf16(quad, i);
  }
  static __m512bh two(const X* x) {
    int pair;
    __builtin_memcpy(&pair, x, sizeof(pair));
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Vec add_two(Vec sum, __m512bh x, Weights w) { return {_mm512_dpbf16_ps(sum.v, x, w)}; }
  static Vec add_last(Vec sum, const X* x, Weights w) {
    return add_two(sum, (__m512bh)_mm512_set1_epi32(x->bits), w);
  }
};
#else
using Bf16Step = FmaStep<bf16>;
#endif

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
