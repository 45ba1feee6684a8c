// Offset of the block scale of (row, group) in a buffer, for the layouts used by common FP4 kernels. Each
// layout is a small type; convert_scales() converts between them.
//
// Dims: rows M, groups G = K / block. One byte per scale. In all layouts the four groups 4 i .. 4 i + 3 of a
// row are contiguous.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// [M, G], no padding. The layout of checkpoints.
struct LinearScales {
  static constexpr const char* kName = "linear";
  int64_t rows = 0, groups = 0;

  constexpr int64_t num_bytes() const { return rows * groups; }
  constexpr int64_t offset(int64_t m, int64_t g) const { return m * groups + g; }
};

// "128x4": tiles of 128 rows x 4 groups, [M/128, G/4] of [32, 4, 4] = (m % 32, m % 128 / 32, g % 4). Rows are
// padded to 128 and groups to 4; padding is zero.
struct Swizzled128x4Scales {
  static constexpr const char* kName = "swizzled_128x4";
  int64_t rows = 0, groups = 0;

  constexpr int64_t num_bytes() const { return round_up(rows, 128) * round_up(groups, 4); }
  constexpr int64_t offset(int64_t m, int64_t g) const {
    const int64_t tile = m / 128 * ((groups + 3) / 4) + g / 4;
    return tile * 512 + m % 32 * 16 + m % 128 / 32 * 4 + g % 4;
  }
};

// "8x4", for few rows: tiles of 8 rows x 4 groups, [M/8, G/4] of [8, 4]. Padding is zero.
struct Swizzled8x4Scales {
  static constexpr const char* kName = "swizzled_8x4";
  int64_t rows = 0, groups = 0;

  constexpr int64_t num_bytes() const { return round_up(rows, 8) * round_up(groups, 4); }
  constexpr int64_t offset(int64_t m, int64_t g) const {
    const int64_t tile = m / 8 * ((groups + 3) / 4) + g / 4;
    return tile * 32 + m % 8 * 4 + g % 4;
  }
};

template <class L>
concept ScaleLayout = requires(const L layout, int64_t i) {
  { layout.rows } -> std::convertible_to<int64_t>;
  { layout.groups } -> std::convertible_to<int64_t>;
  { layout.num_bytes() } -> std::same_as<int64_t>;
  { layout.offset(i, i) } -> std::same_as<int64_t>;
};

// Copies the scales of rows [0, num_rows) and writes no other byte of dst. Preconditions: both layouts have
// at least num_rows rows and the same groups; src and dst do not overlap.
template <ScaleLayout From, ScaleLayout To>
void copy_scale_rows(const From& from, const uint8_t* src, const To& to, uint8_t* dst, int64_t num_rows) {
  for (int64_t m = 0; m < num_rows; ++m)
    for (int64_t g = 0; g < from.groups; g += 4)
      std::memcpy(dst + to.offset(m, g), src + from.offset(m, g), from.groups - g < 4 ? from.groups - g : 4);
}

// Converts src [from.num_bytes()] in layout `from` to dst [to.num_bytes()] in layout `to`, with zero padding;
// no overlap. For the inverse, exchange the layouts. Returns kInvalidArgument if the shapes differ.
template <ScaleLayout From, ScaleLayout To>
Status convert_scales(const From& from, const uint8_t* src, const To& to, uint8_t* dst) {
  if (from.rows != to.rows || from.groups != to.groups)
    return invalid_argument("scales of shape [" + std::to_string(from.rows) + ", " +
                            std::to_string(from.groups) + "] in layout " + From::kName + " cannot become [" +
                            std::to_string(to.rows) + ", " + std::to_string(to.groups) + "] in layout " +
                            To::kName + "; the shapes must be equal");
  std::fill_n(dst, to.num_bytes(), uint8_t{0});
  copy_scale_rows(from, src, to, dst, from.rows);
  return {};
}

// E matrices of equal shape, each padded separately in the 128x4 layout: [E, rup(M,128), rup(G,4)]. This is
// also the physical layout of "masked" (grouped) quantisers, which do not write the rows past an expert's
// count or any padding: see copy_masked_scales_*().
struct BatchedScales {
  int64_t experts = 0, rows = 0, groups = 0;

  constexpr Swizzled128x4Scales expert() const { return {rows, groups}; }
  constexpr int64_t num_bytes() const { return experts * expert().num_bytes(); }
  constexpr int64_t offset(int64_t e, int64_t m, int64_t g) const {
    return e * expert().num_bytes() + expert().offset(m, g);
  }
};

// Copy linear [E, M, G] to batched and back, but only rows [0, num_rows[e]) of each expert. num_rows is [E],
// each in [0, layout.rows].
void copy_masked_scales_to_batched(const BatchedScales& layout, const uint8_t* linear,
                                   const int32_t* num_rows, uint8_t* batched);
void copy_masked_scales_to_linear(const BatchedScales& layout, const uint8_t* batched,
                                  const int32_t* num_rows, uint8_t* linear);

// The "MMA layout" of CuTe kernels: a six-dimensional view of a BatchedScales buffer. The index is
// (m % 32, m % 128 / 32, m / 128, g % 4, g / 4, e).
struct MmaScaleView {
  std::array<int64_t, 6> shape;
  std::array<int64_t, 6> strides;

  static MmaScaleView of(const BatchedScales& layout);
  static std::array<int64_t, 6> index(int64_t e, int64_t m, int64_t g);
  int64_t offset(const std::array<int64_t, 6>& i) const;
};

// Activation scales of rows that are grouped by expert without gaps. Each expert's scales start in a new
// 128x4 tile, at row rup(first_token[e] + 127 e, 128), which depends only on e and the rows before it.
struct ExpertPackedScales {
  std::vector<int64_t> first_token;  // [E + 1]: expert e has rows [first_token[e], first_token[e + 1])
  int64_t groups = 0;

  static constexpr int64_t first_row(int64_t expert, int64_t first_token_of_expert) {
    return round_up(first_token_of_expert + 127 * expert, 128);
  }
  // Precondition of the functions below: first_token is not empty and never decreases.
  int64_t num_experts() const { return static_cast<int64_t>(first_token.size()) - 1; }
  int64_t num_bytes() const;
  // m is the row within expert e.
  int64_t offset(int64_t e, int64_t m, int64_t g) const;
};

// Converts linear [first_token[E], G] to packed [num_bytes()], with zero padding; unpack_expert_scales() is
// the inverse.
void pack_expert_scales(const ExpertPackedScales& layout, const uint8_t* linear, uint8_t* packed);
void unpack_expert_scales(const ExpertPackedScales& layout, const uint8_t* packed, uint8_t* linear);

}  // namespace fp4moe
