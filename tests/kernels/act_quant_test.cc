// Compares quantize_act with the quantisers of formats/ and with integer rounding, bit for bit.
#include "kernels/act_quant.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>

#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/nvfp4.h"
#include "kernels/cpu/act_quant_chunk.h"
#include "kernels/dense_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

template <class T>
std::span<const uint8_t> bytes_of(const std::vector<T>& v) {
  return {reinterpret_cast<const uint8_t*>(v.data()), v.size() * sizeof(T)};
}

// Rows whose blocks differ by many powers of two, with zeros of both signs and whole blocks of zeros.
std::vector<float> uneven_rows(int64_t rows, int64_t cols, uint64_t seed) {
  Random random(seed);
  std::vector<float> x = random.normal(rows * cols);
  for (size_t first = 0; first < x.size(); first += 16) {
    const int exponent = static_cast<int>(random.integer(-12, 12));
    const int64_t kind = random.integer(0, 9);
    for (size_t i = first; i < first + 16; ++i) {
      x[i] = std::ldexp(x[i], exponent);
      if (kind == 0) x[i] = i % 2 == 0 ? 0.0f : -0.0f;
      if (kind == 1 && i % 3 == 0) x[i] = -0.0f;
      if (kind == 2) x[i] = std::ldexp(x[i], -140);
    }
  }
  return x;
}

class ActQuant : public testing::TestWithParam<std::tuple<DType, DType>> {
 protected:
  DType in() const { return std::get<0>(GetParam()); }
  DType out() const { return std::get<1>(GetParam()); }

  struct Quantised {
    std::vector<float> values, row_scales, block_scales;
  };
  Quantised run(ActQuantKind kind, const std::vector<float>& values, int64_t cols, EncodeScale scale = {},
                int block = 16) const {
    const int64_t rows = static_cast<int64_t>(values.size()) / cols;
    ActBuffer x(in(), rows, cols, values), y(out(), rows, cols);
    Quantised q;
    q.row_scales.assign(static_cast<size_t>(rows), -1);
    q.block_scales.assign(static_cast<size_t>(rows * cols / block), -1);
    quantize_act({.kind = kind,
                  .x = x.view(),
                  .block = block,
                  .scale = scale,
                  .out = y.view(),
                  .row_scales = q.row_scales.data(),
                  .block_scales = q.block_scales.data()});
    q.values = y.values();
    return q;
  }
  std::vector<float> as_input(const std::vector<float>& values) const {
    return in() == DType::kF32 ? values : to_float(to_bf16(values));
  }
};

// Decodes a row quantised by formats/nvfp4.h to code * block scale.
std::vector<float> codes_times_scales(const std::vector<uint8_t>& codes, const std::vector<uint8_t>& scales) {
  std::vector<float> values;
  for (size_t i = 0; i < 2 * codes.size(); ++i)
    values.push_back(e2m1_decode(i % 2 == 0 ? e2m1_even(codes[i / 2]) : e2m1_odd(codes[i / 2])) *
                     e4m3_decode(scales[i / 16]));
  return values;
}

TEST_P(ActQuant, Nvfp4StaticIsTheFormatsRowsBitForBit) {
  for (int64_t cols : {16, 32, 48, 208, 2880})
    for (float gs : {1.0f, 0.37f, 448.0f, 2688.0f / 3.1f, 1e-3f, 1e30f}) {
      const std::vector<float> x = uneven_rows(9, cols, static_cast<uint64_t>(cols));
      const std::vector<float> rounded = as_input(x);
      const Quantised q = run(ActQuantKind::kNvfp4Static, x, cols, {gs});
      for (int64_t t = 0; t < 9; ++t) {
        std::vector<uint8_t> codes(static_cast<size_t>(cols / 2)), scales(static_cast<size_t>(cols / 16));
        nvfp4_quantize_row(rounded.data() + t * cols, cols, EncodeScale{gs}, codes.data(), scales.data());
        const std::vector<float> row(q.values.begin() + t * cols, q.values.begin() + (t + 1) * cols);
        ASSERT_TRUE(same_bytes(bytes_of(row), bytes_of(codes_times_scales(codes, scales))))
            << "K=" << cols << " gs=" << gs << " row " << t;
      }
    }
}

TEST_P(ActQuant, Nvfp4PerTokenIsTheFormatsRowsBitForBit) {
  for (int64_t cols : {16, 64, 2880}) {
    std::vector<float> x = uneven_rows(9, cols, 77);
    std::fill_n(x.begin() + 3 * cols, cols, 0.0f);  // a row of zeros
    x[static_cast<size_t>(5 * cols)] = kInf;
    x[static_cast<size_t>(6 * cols + 3)] = NAN;
    std::fill_n(x.begin() + 7 * cols, cols, NAN);
    const std::vector<float> rounded = as_input(x);
    const Quantised q = run(ActQuantKind::kNvfp4PerToken, x, cols);
    for (int64_t t = 0; t < 9; ++t) {
      std::vector<uint8_t> codes(static_cast<size_t>(cols / 2)), scales(static_cast<size_t>(cols / 16));
      const DecodeScale decode =
          nvfp4_quantize_row_per_token(rounded.data() + t * cols, cols, codes.data(), scales.data());
      const std::vector<float> row(q.values.begin() + t * cols, q.values.begin() + (t + 1) * cols);
      EXPECT_TRUE(same_bytes(bytes_of(row), bytes_of(codes_times_scales(codes, scales)))) << t;
      EXPECT_EQ(q.row_scales[static_cast<size_t>(t)], decode.value) << t;
    }
    EXPECT_EQ(q.row_scales[3], 0);
    EXPECT_EQ(q.row_scales[7], 0);
  }
}

// Expected values derived by hand: the row amax 2688 gives row scale 1, and the first block's amax 6 * 448
// gives block scale 448, so 1344 is 3 * 448.
TEST_P(ActQuant, Nvfp4HandChecked) {
  std::vector<float> x(32);
  x[0] = 2688, x[1] = -1344, x[2] = 300;
  x[16] = 6, x[17] = 0.4f, x[18] = -2.5f;
  const Quantised q = run(ActQuantKind::kNvfp4PerToken, x, 32);
  EXPECT_EQ(q.row_scales[0], 1);
  const std::vector<float> head(q.values.begin(), q.values.begin() + 3),
      tail(q.values.begin() + 16, q.values.begin() + 19);
  EXPECT_EQ(head, (std::vector<float>{2688, -1344, 224}));
  EXPECT_EQ(tail, (std::vector<float>{6, 0.5f, -2}));  // -2.5 is a tie, rounded to the even fraction
}

TEST_P(ActQuant, Nvfp4NotFinite) {
  std::vector<float> x(48, 1.0f);
  x[1] = NAN, x[2] = -NAN;
  x[16] = kInf, x[17] = -kInf;
  for (int i = 32; i < 48; ++i) x[static_cast<size_t>(i)] = NAN;
  const std::vector<float> y = run(ActQuantKind::kNvfp4Static, x, 48, {2688.0f}).values;
  for (float v : y) EXPECT_TRUE(std::isfinite(v));
  EXPECT_EQ(y[1], y[2]);
  EXPECT_EQ(y[1], 6 * 448);
  EXPECT_EQ(y[16], 6 * 448);
  EXPECT_EQ(y[17], -6 * 448);
  EXPECT_EQ(y[32], 0);
}

TEST_P(ActQuant, Int8IsTheNearestInteger) {
  for (int block : {16, 32})
    for (int64_t cols : {32, 96, 2880}) {
      const std::vector<float> x = uneven_rows(9, cols, 5), rounded = as_input(x);
      const Quantised q = run(ActQuantKind::kInt8Block, x, cols, {}, block);
      for (size_t b = 0; b < q.block_scales.size(); ++b) {
        float amax = 0;
        for (size_t i = b * block; i < (b + 1) * block; ++i) amax = std::max(amax, std::abs(rounded[i]));
        ASSERT_EQ(q.block_scales[b], amax / 127.0f < kMinInt8Scale ? 0 : amax / 127.0f);
        for (size_t i = b * block; i < (b + 1) * block; ++i) {
          const long code = amax / 127.0f < kMinInt8Scale ? 0 : std::lrint(rounded[i] / (amax / 127.0f));
          ASSERT_EQ(q.values[i], static_cast<float>(code)) << rounded[i] << " / " << amax;
        }
      }
    }
}

TEST_P(ActQuant, Int8TiesToEvenAndZeroBlocks) {
  std::vector<float> x(64);
  x[0] = 127;  // scale 1
  x[1] = 0.5f, x[2] = 1.5f, x[3] = 2.5f, x[4] = -0.5f, x[5] = -3.5f, x[6] = 126.5f;
  x[32] = -0.0f;
  const Quantised q = run(ActQuantKind::kInt8Block, x, 64, {}, 32);
  EXPECT_EQ(q.block_scales, (std::vector<float>{1, 0}));
  EXPECT_EQ(std::vector<float>(q.values.begin(), q.values.begin() + 7),
            (std::vector<float>{127, 0, 2, 2, 0, -4, 126}));
  for (size_t i = 32; i < 64; ++i) EXPECT_EQ(q.values[i], 0);
}

TEST_P(ActQuant, Int8NotFiniteMakesTheBlocksScaleNan) {
  for (float bad : {NAN, -NAN, kInf, -kInf}) {
    std::vector<float> x(32, 1.0f);
    x[20] = bad;
    const Quantised q = run(ActQuantKind::kInt8Block, x, 32);
    EXPECT_EQ(q.block_scales[0], 1 / 127.0f);
    EXPECT_TRUE(std::isnan(q.block_scales[1]));
    for (size_t i = 16; i < 32; ++i) EXPECT_EQ(q.values[i], 0);
  }
}

// A scale below the supported range gives zeros; a scale above it gives NaN, as an infinite input does.
TEST_P(ActQuant, Int8ScaleRange) {
  for (int exponent = -149; exponent < 128; ++exponent) {
    const float x = as_input({std::ldexp(127.0f, exponent)})[0];  // scale 2^exponent
    if (!std::isfinite(x)) continue;
    std::vector<float> values(16, x);
    values[3] = -x;
    const Quantised q = run(ActQuantKind::kInt8Block, values, 16);
    const bool low = exponent<-125, high = exponent> 110;
    EXPECT_EQ(q.values[0], low || high ? 0 : 127) << exponent;
    EXPECT_EQ(q.values[3], low || high ? 0 : -127) << exponent;
    if (high)
      EXPECT_TRUE(std::isnan(q.block_scales[0])) << exponent;
    else
      EXPECT_EQ(q.block_scales[0], low ? 0 : std::ldexp(1.0f, exponent));
  }
}

// kI8 output holds the same codes, with each group of eight columns in the order of the byte dot kernels.
TEST_P(ActQuant, Int8BytesAreTheSameCodes) {
  std::vector<float> values = uneven_rows(7, 96, 8);
  values[100] = NAN;
  const Quantised q = run(ActQuantKind::kInt8Block, values, 96, {}, 32);
  ActBuffer x(in(), 7, 96, values);
  std::vector<int8_t> bytes(values.size());
  std::vector<float> scales(q.block_scales.size());
  std::vector<int32_t> starts(scales.size());
  quantize_act({.kind = ActQuantKind::kInt8Block,
                .x = x.view(),
                .block = 32,
                .out = {bytes.data(), DType::kI8, 7, 96},
                .block_scales = scales.data(),
                .block_starts = starts.data()});
  EXPECT_TRUE(same_bytes(bytes_of(scales), bytes_of(q.block_scales)));
  const int columns[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  for (size_t i = 0; i < bytes.size(); ++i)
    ASSERT_EQ(bytes[i], q.values[i / 8 * 8 + static_cast<size_t>(columns[i % 8])]) << i;
  for (size_t b = 0; b < starts.size(); ++b)
    ASSERT_EQ(starts[b], -12 * std::accumulate(&bytes[32 * b], &bytes[32 * b] + 32, 0)) << b;
}

TEST_P(ActQuant, InPlaceAndNothingToDo) {
  if (in() != out()) GTEST_SKIP();
  const std::vector<float> values = uneven_rows(5, 96, 8);
  for (ActQuantKind kind :
       {ActQuantKind::kNvfp4Static, ActQuantKind::kNvfp4PerToken, ActQuantKind::kInt8Block}) {
    const Quantised apart = run(kind, values, 96, {3.5f});
    ActBuffer x(in(), 5, 96, values);
    std::vector<float> row_scales(5), block_scales(30);
    quantize_act({kind, x.view(), 16, {3.5f}, x.view(), row_scales.data(), block_scales.data()});
    EXPECT_TRUE(same_bytes(bytes_of(x.values()), bytes_of(apart.values)));
    quantize_act({kind, {nullptr, in(), 0, 96}, 16, {3.5f}, {nullptr, out(), 0, 96}, nullptr, nullptr});
  }
}

// Quantises every finite bf16 in a block with a fixed largest element: all codes, ties and signs.
TEST_P(ActQuant, EveryBf16ThroughOneBlock) {
  const float gs = 1.7f;
  std::vector<float> x;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float v = bf16_to_float({static_cast<uint16_t>(bits)});
    if (!std::isfinite(v)) continue;
    if (x.size() % 16 == 0) x.push_back(std::ldexp(1.375f, static_cast<int>(x.size() / 16 % 250) - 125));
    x.push_back(v);
  }
  x.resize((x.size() + 15) / 16 * 16);
  const int64_t cols = static_cast<int64_t>(x.size());
  std::vector<uint8_t> codes(x.size() / 2), scales(x.size() / 16);
  nvfp4_quantize_row(x.data(), cols, EncodeScale{gs}, codes.data(), scales.data());
  EXPECT_TRUE(same_bytes(bytes_of(run(ActQuantKind::kNvfp4Static, x, cols, {gs}).values),
                         bytes_of(codes_times_scales(codes, scales))));
}

INSTANTIATE_TEST_SUITE_P(Types, ActQuant,
                         testing::Combine(testing::Values(DType::kBF16, DType::kF32),
                                          testing::Values(DType::kBF16, DType::kF32)),
                         [](const auto& p) {
                           return std::string(dtype_name(std::get<0>(p.param))) + "_to_" +
                                  dtype_name(std::get<1>(p.param));
                         });

// Compares the loops of every ISA with the quantisers of formats/ and with each other.
class ActQuantIsa : public testing::TestWithParam<Isa> {
 protected:
  static const ActQuantChunk& chunk(Isa isa) {
#if defined(__x86_64__)
    if (isa == Isa::kAvx512) return cpu_avx512::act_quant_chunk;
    if (isa == Isa::kAvx2) return cpu_avx2::act_quant_chunk;
#endif
    return cpu_scalar::act_quant_chunk;
  }
  // Random bit patterns. Two thirds of the blocks have similar exponents, so that all codes occur; a third
  // also has short fractions, which produce ties.
  static std::vector<float> any_bits(Random& random, int64_t cols) {
    std::vector<float> x;
    for (int64_t i = 0, kind = 0, exponent = 0; i < cols; ++i) {
      if (i % 16 == 0) kind = random.integer(0, 2), exponent = random.integer(4, 250);
      uint32_t bits = static_cast<uint32_t>(random.integer(0, 0xffffffff));
      if (kind > 0)
        bits = (bits & 0x807fffffu) | static_cast<uint32_t>(exponent + random.integer(0, 4)) << 23;
      if (kind == 2) bits &= 0xfff00000u;
      x.push_back(std::bit_cast<float>(bits));
    }
    return x;
  }
};

TEST_P(ActQuantIsa, AnyBitsGiveTheFormatsNvfp4) {
  Random random(19);
  constexpr int64_t kCols = 16 * 37;
  std::vector<float> out(kCols);
  std::vector<uint8_t> codes(kCols / 2), scales(kCols / 16);
  for (int row = 0; row < 3000; ++row) {
    std::vector<float> x = any_bits(random, kCols);
    const EncodeScale gs = {
        std::bit_cast<float>(static_cast<uint32_t>(random.integer(0x00800000, 0x7f7fffff)))};
    nvfp4_quantize_row(x.data(), kCols, gs, codes.data(), scales.data());
    ActQuantArgs args;
    args.x = {x.data(), DType::kF32, 1, kCols};
    args.out = {out.data(), DType::kF32, 1, kCols};
    chunk(GetParam()).nvfp4_row(args, 0, gs.value, to_decode(gs).value);
    ASSERT_TRUE(same_bytes(bytes_of(out), bytes_of(codes_times_scales(codes, scales)))) << "gs=" << gs.value;
  }
}

TEST_P(ActQuantIsa, AnyBitsGiveTheScalarInt8) {
  Random random(23);
  constexpr int64_t kCols = 32 * 19;
  for (int row = 0; row < 2000; ++row) {
    std::vector<float> x = any_bits(random, kCols);
    std::vector<int8_t> bytes[2];
    std::vector<float> scales[2];
    std::vector<int32_t> starts[2];
    for (int i = 0; i < 2; ++i) {
      bytes[i].resize(kCols);
      scales[i].resize(kCols / 32);
      starts[i].resize(kCols / 32);
      ActQuantArgs args;
      args.kind = ActQuantKind::kInt8Block;
      args.x = {x.data(), DType::kF32, 1, kCols};
      args.block = 32;
      args.out = {bytes[i].data(), DType::kI8, 1, kCols};
      args.block_scales = scales[i].data();
      args.block_starts = starts[i].data();
      chunk(i == 0 ? Isa::kScalar : GetParam()).int8_row(args, 0);
    }
    ASSERT_EQ(bytes[1], bytes[0]);
    ASSERT_EQ(starts[1], starts[0]);
    for (size_t b = 0; b < scales[0].size(); ++b) {
      if (std::isnan(scales[0][b]) && std::isnan(scales[1][b])) continue;
      ASSERT_EQ(scales[1][b], scales[0][b]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, ActQuantIsa, testing::ValuesIn([] {
                           std::vector<Isa> all;
                           for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512})
                             if (isa_available(isa)) all.push_back(isa);
                           return all;
                         }()),
                         [](const auto& p) { return std::string(isa_name(p.param)); });

}  // namespace
}  // namespace fp4moe
