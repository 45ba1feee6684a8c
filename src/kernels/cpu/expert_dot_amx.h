// Computes  out[t, r] = sum over k of x[t, k] * w[r, k] for the 16 rows r of one or two panels, x bf16, with
//           AMX tiles: 32 columns are decoded to bf16, scale included, while the previous 32 are multiplied.
// Bytes     the panels once for up to 32 rows of x, again from the cache for every 32 more rows; x once for
//           two panels.
// Flops     2 T N K; decoding 32 weights costs 3 operations with MXFP4 and 8 with NVFP4.
// Bound     memory up to about 50 rows; then the tiles (MXFP4), or decoding (NVFP4).
// Numerics  A weight times its block scale is exact in bf16: the scale is a power of two, or has 4
//           significant bits that multiply the code's 2. One tdpbf16ps sums the even and the odd columns of a
//           step, each from 0 in ascending order, adds the two sums, then adds the result to the total, in
//           the same way for every number of rows. An MXFP4 panel with scales whose products are not normal
//           bf16 numbers is computed by AVX-512's dots instead.
#pragma once

#include "kernels/cpu/expert_dot_avx512.h"
#include "kernels/cpu/tiles_amx.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

constexpr int kMaxTileTokens = 128;  // their columns stay in the L2 cache
using TokenSums = float[kMaxTileTokens][kPanelRows];

constexpr int kStepCodeBytes = kTileColumns / 8 * 64;
constexpr int64_t kTilePrefetchBytes = 2 << 10;  // ahead in each panel; 8 KiB is 20 % slower

// MXFP4 scale bytes whose products with all codes are normal bf16 numbers.
constexpr int kMinScaleByte = 2, kMaxScaleByte = 252;

// The codes' values times 2^(kMaxScaleByte - 127) as bf16, twice; -0 is 0. For smaller scales, the difference
// is subtracted from the exponent with saturation, which keeps 0.
struct LargestCodes {
  alignas(64) uint16_t bits[32];
};
constexpr LargestCodes make_largest_codes() {
  LargestCodes codes{};
  for (int i = 0; i < 32; ++i)
    codes.bits[i] = static_cast<uint16_t>(i % 8 == 0 ? 0 : kCodeBf16[i] + ((kMaxScaleByte - 127) << 7));
  return codes;
}
constexpr LargestCodes kLargestCodes = make_largest_codes();

alignas(64) constexpr float kCodeFloat[16] = {0,     0.5f,  1,     1.5f,  2,     3,     4,     6,
                                              -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// Shifts 16-bit words right by 4 i with a multiplication, since the shift unit is busy.
inline __m512i shift_right_by_nibbles(__m512i words, int i) {
  return i == 0 ? words : _mm512_mulhi_epu16(words, _mm512_set1_epi16(int16_t(1 << (16 - 4 * i))));
}

// Decodes kColumns columns of a panel; scales and codes point to the first of them.
template <Fp4Format F, int kColumns>
inline void decode_columns(const uint8_t* scales, const uint8_t* codes, int64_t prefetch, WeightTile& tile) {
  if constexpr (F == Fp4Format::kMxfp4) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(scales)));
    const __m512i less = _mm512_sub_epi32(_mm512_set1_epi32(kMaxScaleByte), bytes);
    const __m512i exponents = _mm512_or_si512(_mm512_slli_epi32(less, 7), _mm512_slli_epi32(less, 23));
    const __m512i table = _mm512_load_si512(kLargestCodes.bits);
#pragma GCC unroll 4
    for (int j = 0; j < kColumns / 8; ++j) {
      _mm_prefetch(reinterpret_cast<const char*>(codes + 64 * j + prefetch), _MM_HINT_T0);
      const __m512i words = _mm512_load_si512(codes + 64 * j);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m512i largest = _mm512_permutexvar_epi16(shift_right_by_nibbles(words, i), table);
        _mm512_store_si512(tile[4 * j + i], _mm512_subs_epu16(largest, exponents));
      }
    }
  } else {
    const __m512 table = _mm512_load_ps(kCodeFloat);
#pragma GCC unroll 4
    for (int j = 0; j < kColumns / 8; ++j) {
      _mm_prefetch(reinterpret_cast<const char*>(codes + 64 * j + prefetch), _MM_HINT_T0);
      const __m512i words = _mm512_load_si512(codes + 64 * j);
      const __m512 scale = block_scales<F>(scales + j / 2 * kPanelRows);
      const auto value = [&](int shift) {
        const __m512 code = _mm512_permutexvar_ps(_mm512_srli_epi32(words, shift), table);
        return _mm512_castps_si512(_mm512_mul_ps(code, scale));
      };
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
        _mm512_store_si512(
            tile[4 * j + i],
            _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(value(4 * i), 16), value(16 + 4 * i)));
    }
  }
}

// A chunk's panels and all rows of x.
struct PanelRows {
  const uint8_t* panels;
  int64_t panel_bytes, k;
  const bf16* x;  // [rows, K]
  RowTiles rows;

  const uint8_t* panel(int64_t p) const { return panels + p * panel_bytes; }
};

// Multiplies row tiles i .. i + R - 1 by panels p .. p + P - 1.
template <Fp4Format F, int R, int P>
class PanelTiles {
 public:
  PanelTiles(const PanelRows& a, int64_t i, int64_t p)
      : a_(a), panel_(a.panel(p)), scale_bytes_(expert_panel_scale_bytes(F, a.k)) {
    for (int r = 0; r < R; ++r) x_[r] = a.x + a.rows.first(i + r) * a.k;
  }

  void multiply() {
    const int64_t whole = a_.k / kTileColumns;
    zero_tiles();
    if (whole > 0) decode(0);
    for (int64_t step = 0; step < whole; ++step) {
      if (step + 1 < whole) decode(step + 1);
      const int64_t at = step * kTileColumns;
      const auto& weights = weights_[step % 2];
      multiply_tiles<R, P>(x_[0] + at, x_[R - 1] + at, 2 * a_.k, weights[0], weights[P - 1]);
    }
    if constexpr (F == Fp4Format::kNvfp4)
      if (a_.k % kTileColumns != 0) multiply_tail(whole);
  }

 private:
  template <int kColumns>
  void decode_panel(int p, int64_t step, int64_t ahead, WeightTile& tile) const {
    const uint8_t* panel = panel_ + p * a_.panel_bytes;
    const int64_t scales = step * (kTileColumns / fp4_block(F) * kPanelRows);
    decode_columns<F, kColumns>(panel + scales, panel + scale_bytes_ + step * kStepCodeBytes, ahead, tile);
  }

  void decode(int64_t step) {
    // At a panel's last columns, fetch the first columns of the next P panels.
    const bool last = a_.k / 8 * 64 - step * kStepCodeBytes <= kTilePrefetchBytes;
    const int64_t ahead = kTilePrefetchBytes + (last ? (P - 1) * a_.panel_bytes : 0);
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) decode_panel<kTileColumns>(p, step, ahead, weights_[step % 2][p]);
    tile_memory_written(weights_);
  }

  // Multiplies the last block of 16 columns, padded with zeros to a whole step.
  void multiply_tail(int64_t step) const {
    TailTiles tail;
    for (int r = 0; r < R; ++r)
      tail.copy_rows(r, x_[r] + step * kTileColumns, a_.rows.height, a_.k, kTileColumns / 2);
    for (int p = 0; p < P; ++p) decode_panel<kTileColumns / 2>(p, step, 0, tail.weights[p]);
    tail.multiply<R, P>();
  }

  const PanelRows& a_;
  const uint8_t* panel_;
  int64_t scale_bytes_;
  const bf16* x_[R];
  alignas(64) WeightTile weights_[2][P];  // for even and odd steps
};

// Computes out[p][row], the sums of panel p, for panels p .. p + P - 1.
template <Fp4Format F, int P>
void expert_dot_panels(const PanelRows& a, int64_t p, TokenSums* out) {
  const auto multiply = [&]<int R>(int64_t i) {
    PanelTiles<F, R, P>(a, i, p).multiply();
    float* to[R][P];
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < P; ++j) to[r][j] = out[p + j][a.rows.first(i + r)];
    store_tiles<R, P>(to);
  };
  int64_t i = 0;
  for (; i + 1 < a.rows.count; i += 2) multiply.template operator()<2>(i);
  if (i < a.rows.count) multiply.template operator()<1>(i);
}

// Returns which of 64 scale bytes are outside kMinScaleByte .. kMaxScaleByte.
inline __mmask64 unfit_scales(__m512i bytes) {
  return _mm512_cmpgt_epu8_mask(_mm512_sub_epi8(bytes, _mm512_set1_epi8(kMinScaleByte)),
                                _mm512_set1_epi8(int8_t(kMaxScaleByte - kMinScaleByte)));
}

// Returns whether all products of scales and codes are normal bf16 numbers or 0.
inline bool mxfp4_panel_fits(const uint8_t* panel, int64_t k) {
  const int64_t num_scales = k / kTileColumns * kPanelRows;
  __mmask64 unfit = 0, valid = ~__mmask64{0};
  for (int64_t i = 0; i < num_scales; i += 64) {
    if (num_scales - i < 64) valid = (__mmask64{1} << (num_scales - i)) - 1;
    unfit |= unfit_scales(_mm512_load_si512(panel + i)) & valid;
  }
  if (unfit == 0) return true;
  for (int64_t b = 0; b < k / kTileColumns; ++b) {
    const __m128i scales = _mm_load_si128(reinterpret_cast<const __m128i*>(panel + b * kPanelRows));
    const uint8_t* codes = panel + expert_panel_scale_bytes(Fp4Format::kMxfp4, k) + b * kStepCodeBytes;
    __m512i magnitudes = _mm512_setzero_si512();
    for (int j = 0; j < kTileColumns / 8; ++j)
      magnitudes = _mm512_or_si512(magnitudes, _mm512_load_si512(codes + 64 * j));
    const __mmask16 nonzero = _mm512_test_epi32_mask(magnitudes, _mm512_set1_epi32(0x77777777));
    const __mmask16 large = _mm_cmpgt_epu8_mask(scales, _mm_set1_epi8(int8_t(kMaxScaleByte)));
    if (unfit_scales(_mm512_castsi128_si512(scales)) & (nonzero | large) & 0xffff) return false;
  }
  return true;
}

// Computes out[p][t][r] = sum over k of x[t, k] * w[r, k] for num_panels <= 2 panels p. Whether tiles or
// AVX-512 compute a panel's sums depends on the panel alone; the panel's scales are checked afterwards, when
// they are in the cache. The caller has configured the tiles.
template <Fp4Format F>
void expert_dot_tiles(const PanelRows& a, int64_t num_panels, TokenSums* out) {
  if (num_panels == 2)
    expert_dot_panels<F, 2>(a, 0, out);
  else
    for (int64_t p = 0; p < num_panels; ++p) expert_dot_panels<F, 1>(a, p, out);
  if constexpr (F == Fp4Format::kMxfp4)
    for (int64_t p = 0; p < num_panels; ++p)
      if (!mxfp4_panel_fits(a.panel(p), a.k))
        for (int64_t t = 0; t < a.rows.num_rows; ++t)
          expert_dot_bf16<F, 1>(a.panel(p), a.k, a.x + t * a.k, &out[p][t]);
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
