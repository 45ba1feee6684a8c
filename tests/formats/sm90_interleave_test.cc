#include "formats/sm90_interleave.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "formats/bf16.h"
#include "formats/nearest_value.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr Sm90WeightOrder kOrders[] = {Sm90WeightOrder::kFp4Bf16, Sm90WeightOrder::kFp4Fp8,
                                       Sm90WeightOrder::kInt4Fp8};

std::vector<uint8_t> random_bytes(int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(static_cast<size_t>(n));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

uint32_t word_at(const std::vector<uint8_t>& bytes, int64_t word) {
  uint32_t value = 0;
  for (int i = 3; i >= 0; --i) value = value << 8 | bytes[4 * word + i];
  return value;
}

// Code (row, column) of a row-major matrix with k columns.
uint32_t code_at(const std::vector<uint8_t>& codes, int64_t k, int64_t row, int64_t column) {
  return codes[row * k / 2 + column / 2] >> (column % 2 * 4) & 15;
}

// Calls f(word, row_in_quad, lane, matrix, r0, k0) for each word that a thread receives when ldmatrix.x4
// reads 16 rows x 32 bytes of the result at rows r0.., K columns k0..: thread 4 g + q receives word q of row
// g of each of the four 8 x 16-byte matrices (rows 0-7 left, rows 8-15 left, rows 0-7 right, rows 8-15
// right).
template <class F>
void for_each_fragment_word(int64_t n, int64_t k, F f) {
  for (int64_t r0 = 0; r0 < n; r0 += 16)
    for (int64_t k0 = 0; k0 < k; k0 += 64)
      for (int matrix = 0; matrix < 4; ++matrix)
        for (int g = 0; g < 8; ++g)
          for (int q = 0; q < 4; ++q) {
            const int64_t row = r0 + g + 8 * (matrix % 2), word = k0 / 8 + 4 * (matrix / 2) + q;
            f(row * k / 8 + word, g, q, matrix, r0, k0);
          }
}

TEST(Sm90Interleave, WorkedWord) {
  std::vector<uint8_t> src(16 * 32, 0), dst(src.size());
  src[0] = 0x21, src[8 * 32] = 0x43, src[4] = 0x65, src[8 * 32 + 4] = 0xF7;
  ASSERT_TRUE(sm90_interleave_weight(Sm90WeightOrder::kFp4Bf16, src.data(), 16, 64, dst.data()).ok());
  EXPECT_EQ(word_at(dst, 0), 0x6CA62C5Du);
  for (size_t i = 4; i < dst.size(); ++i) EXPECT_EQ(dst[i], 0) << i;
}

// The kernel's masks and its multiplication by 2^126 must produce the operand registers of four m64k16
// WGMMAs.
TEST(Sm90Interleave, Bf16WordsDecodeToWgmmaFragments) {
  const int64_t n = 48, k = 192;
  const std::vector<uint8_t> src = random_bytes(n * k / 2, 1);
  std::vector<uint8_t> dst(src.size());
  ASSERT_TRUE(sm90_interleave_weight(Sm90WeightOrder::kFp4Bf16, src.data(), n, k, dst.data()).ok());
  for_each_fragment_word(n, k, [&](int64_t word, int g, int q, int mma, int64_t r0, int64_t k0) {
    const uint32_t w = word_at(dst, word), mask = 0x81C081C0u;
    const uint32_t registers[4] = {w & mask, w << 3 & mask, w << 6 & mask,
                                   (w << 1 & 0x80008000u) | (w >> 3 & 0x01800180u) | (w >> 7 & 0x00400040u)};
    for (int i = 0; i < 4; ++i)  // a0 (g, k), a1 (g + 8, k), a2 (g, k + 8), a3 (g + 8, k + 8)
      for (int half = 0; half < 2; ++half) {
        const bf16 bits{static_cast<uint16_t>(registers[i] >> (16 * half))};
        const int64_t row = r0 + g + 8 * (i % 2), column = k0 + 16 * mma + 8 * (i / 2) + 2 * q + half;
        const uint32_t code = code_at(src, k, row, column);
        const double magnitude = oracle::e2m1_magnitudes()[code % 8];
        const float value = bf16_to_float(bits) * 0x1p126f;
        ASSERT_EQ(value, code < 8 ? magnitude : -magnitude) << row << ", " << column;
        ASSERT_EQ(std::signbit(value), code >= 8);
      }
  });
}

// A word contains two operand registers of a k32 WGMMA: four codes of row g in the low half and four of row g
// + 8 in the high half.
TEST(Sm90Interleave, Fp8WordsHoldFragmentsOfK32WithSignsMoved) {
  const int64_t n = 32, k = 128;
  const std::vector<uint8_t> src = random_bytes(n * k / 2, 2);
  std::vector<uint8_t> fp4(src.size()), int4(src.size());
  ASSERT_TRUE(sm90_interleave_weight(Sm90WeightOrder::kFp4Fp8, src.data(), n, k, fp4.data()).ok());
  ASSERT_TRUE(sm90_interleave_weight(Sm90WeightOrder::kInt4Fp8, src.data(), n, k, int4.data()).ok());
  const int sign_bit[8] = {7, 15, 23, 31, 3, 11, 19, 27};
  for_each_fragment_word(n, k, [&](int64_t word, int g, int q, int matrix, int64_t r0, int64_t k0) {
    for (int i = 0; i < 8; ++i) {
      const int64_t row = r0 + g + (i < 4 ? 0 : 8);
      const int64_t column = k0 + 32 * (matrix / 2) + 16 * (matrix % 2) + 4 * q + i % 4;
      const uint32_t code = code_at(src, k, row, column);
      ASSERT_EQ(word_at(int4, word) >> (4 * i) & 15, code) << row << ", " << column;
      ASSERT_EQ(word_at(fp4, word) >> (4 * i) & 7, code & 7) << row << ", " << column;
      ASSERT_EQ(word_at(fp4, word) >> sign_bit[i] & 1, code >> 3) << row << ", " << column;
    }
  });
}

TEST(Sm90Interleave, EveryBitHasAPlaceAndComesBack) {
  const int64_t n = 16, k = 128, num_bytes = n * k / 2;
  for (const Sm90WeightOrder order : kOrders) {
    std::vector<uint8_t> hits(num_bytes, 0), src(num_bytes, 0), dst(num_bytes), back(num_bytes);
    for (int64_t bit = 0; bit < num_bytes * 8; ++bit) {
      src[bit / 8] = static_cast<uint8_t>(1 << bit % 8);
      ASSERT_TRUE(sm90_interleave_weight(order, src.data(), n, k, dst.data()).ok());
      ASSERT_TRUE(sm90_deinterleave_weight(order, dst.data(), n, k, back.data()).ok());
      ASSERT_EQ(back, src) << "bit " << bit;
      for (int64_t i = 0; i < num_bytes; ++i) {
        ASSERT_EQ(hits[i] & dst[i], 0) << "bit " << bit << " overwrites another bit";
        hits[i] |= dst[i];
      }
      src[bit / 8] = 0;
    }
    EXPECT_TRUE(same_bytes(hits, std::vector<uint8_t>(num_bytes, 0xff)));
  }
}

RC_GTEST_PROP(Sm90InterleaveProperty, RoundTrips, (uint32_t seed)) {
  const int64_t n = 16 * *rc::gen::inRange<int64_t>(0, 5), k = 64 * *rc::gen::inRange<int64_t>(0, 5);
  const std::vector<uint8_t> src = random_bytes(n * k / 2, seed);
  for (const Sm90WeightOrder order : kOrders) {
    std::vector<uint8_t> dst(src.size()), back(src.size());
    RC_ASSERT(sm90_interleave_weight(order, src.data(), n, k, dst.data()).ok());
    RC_ASSERT(sm90_deinterleave_weight(order, dst.data(), n, k, back.data()).ok());
    RC_ASSERT(back == src);
  }
}

TEST(Sm90Interleave, SizesThatDoNotFitAreRefused) {
  uint8_t byte = 7;
  for (auto [n, k] : {std::pair<int64_t, int64_t>{8, 64}, {16, 32}, {24, 128}, {-16, 64}}) {
    const Status status = sm90_interleave_weight(Sm90WeightOrder::kFp4Bf16, &byte, n, k, &byte);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("[" + std::to_string(n) + ", " + std::to_string(k) + "]"),
              std::string::npos);
    EXPECT_FALSE(sm90_deinterleave_weight(Sm90WeightOrder::kFp4Fp8, &byte, n, k, &byte).ok());
  }
  EXPECT_EQ(byte, 7);
}

}  // namespace
}  // namespace fp4moe
