#include "formats/sm90_interleave.h"

#include <array>
#include <string>

#include "base/check.h"

namespace fp4moe {
namespace {

// Offsets of the four source bytes of one result word, lowest byte of the word first.
using SourceBytes = std::array<int64_t, 4>;

SourceBytes source_bytes(Sm90WeightOrder order, int64_t row, int64_t word, int64_t row_bytes) {
  const int64_t partition = word / 8, half = word % 8 / 4, lane = word % 4;
  const int64_t upper = row % 16 / 8;  // rows 8..15 of a unit hold the later eight bytes of K
  const int64_t first = (row / 16 * 16 + row % 8) * row_bytes + 32 * partition + 16 * half + 8 * upper;
  const int64_t down = 8 * row_bytes;
  if (order == Sm90WeightOrder::kFp4Bf16) {
    const int64_t at = first + lane;
    return {at, at + down, at + 4, at + 4 + down};
  }
  const int64_t at = first + 2 * lane;
  return {at, at + 1, at + down, at + down + 1};
}

// The half-word of codes n0..n3, from bit 15 down:
//   s0 s3 n3[0] s1 n3[2:1] s2 n0[2:0] n1[2:0] n2[2:0]
// A code shifted into place is a bf16's sign, low exponent bits and high fraction bit.
uint32_t spread(uint32_t n0, uint32_t n1, uint32_t n2, uint32_t n3) {
  return (n0 >> 3) << 15 | (n0 & 7) << 6 | (n1 >> 3) << 12 | (n1 & 7) << 3 | (n2 >> 3) << 9 | (n2 & 7) |
         (n3 >> 3) << 14 | (n3 & 1) << 13 | (n3 >> 1 & 3) << 10;
}

std::array<uint32_t, 4> gather(uint32_t field) {
  return {(field >> 15 & 1) << 3 | (field >> 6 & 7), (field >> 12 & 1) << 3 | (field >> 3 & 7),
          (field >> 9 & 1) << 3 | (field & 7),
          (field >> 14 & 1) << 3 | (field >> 10 & 3) << 1 | (field >> 13 & 1)};
}

// New position of the sign of a word's code i, which was at bit 4 i + 3.
constexpr int fp8_sign_bit(int i) { return i < 4 ? 8 * i + 7 : 8 * (i - 4) + 3; }

uint32_t encode_word(Sm90WeightOrder order, const std::array<uint32_t, 4>& b) {
  if (order == Sm90WeightOrder::kFp4Bf16)
    return spread(b[0] & 15, b[1] & 15, b[2] & 15, b[3] & 15) |
           spread(b[0] >> 4, b[1] >> 4, b[2] >> 4, b[3] >> 4) << 16;
  const uint32_t word = b[0] | b[1] << 8 | b[2] << 16 | b[3] << 24;
  if (order == Sm90WeightOrder::kInt4Fp8) return word;
  uint32_t moved = word & 0x77777777u;
  for (int i = 0; i < 8; ++i) moved |= (word >> (4 * i + 3) & 1) << fp8_sign_bit(i);
  return moved;
}

std::array<uint32_t, 4> decode_word(Sm90WeightOrder order, uint32_t word) {
  if (order == Sm90WeightOrder::kFp4Bf16) {
    const auto low = gather(word & 0xffff), high = gather(word >> 16);
    return {low[0] | high[0] << 4, low[1] | high[1] << 4, low[2] | high[2] << 4, low[3] | high[3] << 4};
  }
  if (order == Sm90WeightOrder::kFp4Fp8) {
    uint32_t restored = word & 0x77777777u;
    for (int i = 0; i < 8; ++i) restored |= (word >> fp8_sign_bit(i) & 1) << (4 * i + 3);
    word = restored;
  }
  return {word & 0xff, word >> 8 & 0xff, word >> 16 & 0xff, word >> 24};
}

Status check_weight_shape(int64_t n, int64_t k) {
  if (n >= 0 && k >= 0 && n % 16 == 0 && k % 64 == 0) return {};
  return invalid_argument("cannot interleave a weight of [" + std::to_string(n) + ", " + std::to_string(k) +
                          "] for SM90; N must be a multiple of 16 and K of 64");
}

Status check_scale_shape(const char* name, int64_t rows, int64_t groups, int64_t row_multiple) {
  if (rows >= 0 && groups >= 0 && rows % row_multiple == 0 && groups % 4 == 0) return {};
  return invalid_argument("scale layout " + std::string(name) + " cannot hold [" + std::to_string(rows) +
                          ", " + std::to_string(groups) + "]; rows must be a multiple of " +
                          std::to_string(row_multiple) + " and groups of 4");
}

}  // namespace

Status sm90_interleave_weight(Sm90WeightOrder order, const uint8_t* src, int64_t n, int64_t k, uint8_t* dst) {
  FP4MOE_RETURN_IF_ERROR(check_weight_shape(n, k));
  for (int64_t row = 0; row < n; ++row)
    for (int64_t word = 0; word < k / 8; ++word, dst += 4) {
      const SourceBytes at = source_bytes(order, row, word, k / 2);
      const uint32_t bits = encode_word(order, {src[at[0]], src[at[1]], src[at[2]], src[at[3]]});
      for (int i = 0; i < 4; ++i) dst[i] = static_cast<uint8_t>(bits >> (8 * i));
    }
  return {};
}

Status sm90_deinterleave_weight(Sm90WeightOrder order, const uint8_t* src, int64_t n, int64_t k,
                                uint8_t* dst) {
  FP4MOE_RETURN_IF_ERROR(check_weight_shape(n, k));
  for (int64_t row = 0; row < n; ++row)
    for (int64_t word = 0; word < k / 8; ++word, src += 4) {
      const SourceBytes at = source_bytes(order, row, word, k / 2);
      const uint32_t bits = src[0] | src[1] << 8 | src[2] << 16 | static_cast<uint32_t>(src[3]) << 24;
      const auto bytes = decode_word(order, bits);
      for (int i = 0; i < 4; ++i) dst[at[i]] = static_cast<uint8_t>(bytes[i]);
    }
  return {};
}

Result<Sm90FoldedScales> Sm90FoldedScales::make(int64_t rows, int64_t groups) {
  FP4MOE_RETURN_IF_ERROR(check_scale_shape(kName, rows, groups, 64));
  return Sm90FoldedScales{rows, groups};
}

Result<Sm90ColumnScales> Sm90ColumnScales::make(int64_t rows, int64_t groups) {
  FP4MOE_RETURN_IF_ERROR(check_scale_shape(kName, rows, groups, 1));
  return Sm90ColumnScales{rows, groups};
}

}  // namespace fp4moe
