// Vec in plain C++: the baseline for any CPU, with fixed-length loops that a compiler can vectorise.
#pragma once

namespace fp4moe::FP4MOE_ISA {

struct Vec {
  float lane[16];
};

inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline void assign(float& to, float x) { to = x; }
inline void assign(bf16& to, float x) {
  const uint32_t u = bits_of(x), rounded = u + 0x7fffu + ((u >> 16) & 1u);
  to.bits = static_cast<uint16_t>(((u & 0x7fffffffu) > 0x7f800000u ? u | 0x00400000u : rounded) >> 16);
}

template <class F>
inline Vec make(F lane_of) {
  Vec v;
  for (int i = 0; i < 16; ++i) v.lane[i] = lane_of(i);
  return v;
}

inline Vec zero() {
  return make([](int) { return 0.0f; });
}
inline Vec broadcast(float x) {
  return make([=](int) { return x; });
}
template <class T>
inline Vec load(const T* p) {
  return make([=](int i) { return to_float(p[i]); });
}
template <class T>
inline Vec load_partial(const T* p, int64_t n) {
  return make([=](int i) { return i < n ? to_float(p[i]) : 0; });
}
template <class T>
inline void store_partial(T* p, Vec v, int64_t n) {
  for (int i = 0; i < 16 && i < n; ++i) assign(p[i], v.lane[i]);
}
template <class T>
inline void store(T* p, Vec v) {
  for (int i = 0; i < 16; ++i) assign(p[i], v.lane[i]);
}

struct VecPair {
  Vec even, odd;
};
inline VecPair load_pairs(const bf16* p) {
  return {make([=](int i) { return to_float(p[2 * i]); }),
          make([=](int i) { return to_float(p[2 * i + 1]); })};
}
inline void transpose(Vec* rows) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < i; ++j) {
      const float x = rows[i].lane[j];
      rows[i].lane[j] = rows[j].lane[i];
      rows[j].lane[i] = x;
    }
}

inline Vec add(Vec a, Vec b) {
  return make([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline Vec sub(Vec a, Vec b) {
  return make([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline Vec mul(Vec a, Vec b) {
  return make([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline Vec div(Vec a, Vec b) {
  return make([&](int i) { return a.lane[i] / b.lane[i]; });
}
// A NaN in b propagates.
inline Vec max(Vec a, Vec b) {
  return make([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Vec min(Vec a, Vec b) {
  return make([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Vec fma(Vec a, Vec b, Vec c) {
  return make([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
}

inline Vec and_bits(Vec v, uint32_t mask) {
  return make([&](int i) { return float_of(bits_of(v.lane[i]) & mask); });
}
inline Vec or_bits(Vec a, Vec b) {
  return make([&](int i) { return float_of(bits_of(a.lane[i]) | bits_of(b.lane[i])); });
}
inline void store_int8_eights(int8_t* p, Vec v) {
  for (int i = 0; i < 16; ++i) p[i / 8 * 8 + i % 4 * 2 + i % 8 / 4] = static_cast<int8_t>(v.lane[i]);
}

template <class Op>
inline float reduce(Vec v, Op op) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) v.lane[i] = op(v.lane[i], v.lane[i + width]);
  return v.lane[0];
}
inline float sum(Vec v) {
  return reduce(v, [](float a, float b) { return a + b; });
}
inline float largest(Vec v) {
  return reduce(v, [](float a, float b) { return a > b ? a : b; });
}

// Rounds to the nearest integer, ties to even, for |x| < 2^22.
inline Vec round(Vec x) {
  constexpr float kShift = 12582912;  // 1.5 * 2^23
  return make([&](int i) { return (x.lane[i] + kShift) - kShift; });
}
// Returns x * 2^n for integral n that keeps x normal; a NaN x stays NaN.
inline Vec scale_by_power_of_2(Vec x, Vec n) {
  return make([&](int i) {
    const float bound = n.lane[i] >= -127 && n.lane[i] <= 128 ? n.lane[i] : 0;
    const float scaled =
        float_of(bits_of(x.lane[i]) + (static_cast<uint32_t>(static_cast<int32_t>(bound)) << 23));
    return x.lane[i] == x.lane[i] ? scaled : x.lane[i];
  });
}
// Returns y where x >= limit or x is NaN, and 0 elsewhere.
inline Vec zero_below(Vec x, float limit, Vec y) {
  return make([&](int i) { return x.lane[i] < limit ? 0.0f : y.lane[i]; });
}

}  // namespace fp4moe::FP4MOE_ISA
