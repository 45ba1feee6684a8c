// Exact splits of f32 into bf16, so that tensor cores can multiply f32 exactly. Device code only.
#pragma once

#include <cstdint>

namespace fp4moe {

// Two f32 as three pairs of bf16 that add up to them: each pair holds one piece of the two f32's fractions.
// Infinities and NaN are only in the first pair.
struct Bf16Parts {
  uint32_t v[3];
};

// Makes NaN quiet: a NaN whose fraction bits are all in the lower half would become an infinity.
__device__ __forceinline__ float quiet(float v) { return v == v ? v : __uint_as_float(0x7fc00000u); }

// a is in the pairs' lower halves.
__device__ __forceinline__ Bf16Parts bf16_parts(float a, float b) {
  a = quiet(a), b = quiet(b);
  Bf16Parts parts;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const uint32_t u = __float_as_uint(a), w = __float_as_uint(b);
    parts.v[i] = __byte_perm(u, w, 0x7632);
    a -= __uint_as_float(u & 0xffff0000u);
    b -= __uint_as_float(w & 0xffff0000u);
    if (i == 0) {  // infinity - infinity is NaN
      a = a == a ? a : 0;
      b = b == b ? b : 0;
    }
  }
  return parts;
}

}  // namespace fp4moe
