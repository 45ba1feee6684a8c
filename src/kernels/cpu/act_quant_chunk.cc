// Computes  the codes and scales of activation rows; see kernels/act_quant.h.
// Bytes     2 or 4 read, 1 to 4 written per element.
// Bound     the arithmetic: about 20 operations per 16 elements.
// Numerics  the f32 operations of formats/nvfp4.h one by one, so the bits are those of its quantiser.
//           Rounding to e2m1 and e4m3 adds and subtracts 1.5 * 2^23 steps of the value's binade, which rounds
//           to nearest, ties to the even fraction. The scales of 16 blocks are computed side by side.
#include "kernels/cpu/act_quant_chunk.h"

#include "kernels/cpu/vec.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

constexpr int kGroup = 16;  // blocks whose scales are computed at once
constexpr uint32_t kSign = 0x80000000u, kExponent = 0x7f800000u;
constexpr float kInfinity = __builtin_inff();

inline Vec load_elems(const void* x, DType dtype, int64_t i) {
  return dtype == DType::kF32 ? load(static_cast<const float*>(x) + i)
                              : load(static_cast<const bf16*>(x) + i);
}
inline void store_elems(const ActRows& out, int64_t i, Vec v) {
  if (out.dtype == DType::kF32)
    store(static_cast<float*>(out.data) + i, v);
  else
    store(static_cast<bf16*>(out.data) + i, v);
}

inline Vec abs(Vec x) { return and_bits(x, ~kSign); }

// Rounds x >= 0 to a multiple of `fraction` times its binade's start, or times `low` if that is larger.
inline Vec round_in_binade(Vec x, float low, float fraction) {
  const Vec binade = max(and_bits(x, kExponent), broadcast(low));
  const Vec shift = mul(binade, broadcast(fraction * 12582912.0f));  // 1.5 * 2^23
  return sub(add(x, shift), shift);
}

// Rounds x >= 0 to an e4m3 value; a NaN stays NaN.
inline Vec round_to_e4m3(Vec x) { return round_in_binade(min(broadcast(448.0f), x), 0x1p-6f, 0x1p-3f); }

// Rounds x to an e2m1 value; a NaN of either sign gives 6.
inline Vec round_to_e2m1(Vec x) {
  const Vec low = min(x, broadcast(6.0f)), magnitude = min(abs(low), broadcast(6.0f));
  return or_bits(round_in_binade(magnitude, 1.0f, 0.5f), and_bits(low, kSign));
}

float amax(const void* x, DType dtype, int64_t n) {
  Vec most = zero();
  for (int64_t i = 0; i < n; i += kLanes) most = max(abs(load_elems(x, dtype, i)), most);
  return largest(most);
}

enum class Nan { kIgnored, kInfinite };

// Returns max |x| of each of up to kGroup blocks, beginning at element `first`.
template <Nan nan>
inline Vec block_amax(const ActQuantArgs& a, int64_t first, int64_t blocks) {
  alignas(64) float amaxes[kGroup] = {};
  for (int64_t b = 0; b < blocks; ++b) {
    Vec most = zero();
    for (int i = 0; i < a.block; i += kLanes) {
      Vec x = abs(load_elems(a.x.data, a.x.dtype, first + b * a.block + i));
      if constexpr (nan == Nan::kInfinite) x = min(x, broadcast(kInfinity));
      most = max(x, most);
    }
    amaxes[b] = largest(most);
  }
  return load(amaxes);
}

// Calls body(first block, number of blocks) for groups of the row's blocks.
template <class Body>
inline void for_groups(const ActQuantArgs& a, const Body& body) {
  const int64_t blocks = a.x.cols / a.block;
  for (int64_t b = 0; b < blocks; b += kGroup) body(b, blocks - b < kGroup ? blocks - b : kGroup);
}

// Quantises by the formula of formats/nvfp4.h. A block of zeros is not a special case: its scale rounds to 0.
void nvfp4_row(const ActQuantArgs& a, int64_t row, float encode, float decode) {
  const Vec scale_multiplier = broadcast(encode * (1.0f / 6.0f));
  for_groups(a, [&](int64_t first, int64_t blocks) {
    const int64_t at = row * a.x.cols + first * kLanes;
    const Vec scale = round_to_e4m3(mul(block_amax<Nan::kIgnored>(a, at, blocks), scale_multiplier));
    const Vec inverse = div(broadcast(1.0f), mul(scale, broadcast(decode)));
    alignas(64) float scales[kGroup], multipliers[kGroup];
    store(scales, scale);
    store(multipliers, min(inverse, broadcast(__FLT_MAX__)));
    for (int64_t b = 0; b < blocks; ++b) {
      const Vec x = load_elems(a.x.data, a.x.dtype, at + b * kLanes);
      store_elems(a.out, at + b * kLanes,
                  mul(round_to_e2m1(mul(x, broadcast(multipliers[b]))), broadcast(scales[b])));
    }
  });
}

inline void store_codes(const ActRows& out, int64_t i, Vec codes) {
  if (out.dtype == DType::kI8)
    store_int8_eights(static_cast<int8_t*>(out.data) + i, codes);
  else
    store_elems(out, i, codes);
}

void int8_row(const ActQuantArgs& a, int64_t row) {
  for_groups(a, [&](int64_t first, int64_t blocks) {
    const int64_t at = row * a.x.cols + first * a.block;
    alignas(64) float scales[kGroup];
    store(scales, div(block_amax<Nan::kInfinite>(a, at, blocks), broadcast(127.0f)));
    for (int64_t b = 0; b < blocks; ++b) {
      const bool low = scales[b]<kMinInt8Scale, high = scales[b]> kMaxInt8Scale;
      const int64_t block = row * (a.x.cols / a.block) + first + b;
      a.block_scales[block] = high ? __builtin_nanf("") : low ? 0 : scales[b];
      Vec codes_sum = zero();
      for (int i = 0; i < a.block; i += kLanes) {
        const int64_t elem = at + b * a.block + i;
        const Vec quotient = div(load_elems(a.x.data, a.x.dtype, elem), broadcast(scales[b]));
        const Vec codes = low || high ? zero() : add(round(quotient), zero());  // no negative zeros
        store_codes(a.out, elem, codes);
        codes_sum = add(codes_sum, codes);
      }
      if (a.out.dtype == DType::kI8)
        a.block_starts[block] = kInt8Start * static_cast<int32_t>(sum(codes_sum));
    }
  });
}

}  // namespace

extern const ActQuantChunk act_quant_chunk = {amax, nvfp4_row, int8_row};

}  // namespace fp4moe::FP4MOE_ISA
