#include "io/write/expert_statistics.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace fp4moe {
namespace {

Fp4MatrixView view_of(Fp4Format format, int64_t rows, const std::vector<uint8_t>& codes,
                      const std::vector<uint8_t>& scales, float tensor_scale = 1) {
  const int64_t cols = static_cast<int64_t>(codes.size()) * 2 / rows;
  return {.format = format,
          .rows = rows,
          .cols = cols,
          .codes = codes.data(),
          .scales = scales.data(),
          .code_stride_bytes = cols / 2,
          .scale_stride_bytes = cols / fp4_block(format),
          .tensor_scale = tensor_scale};
}

TEST(Fp4Statistics, CountsEveryCodeOfBothNibbles) {
  std::vector<uint8_t> codes(256);
  std::iota(codes.begin(), codes.end(), 0);  // every byte once: every code 32 times
  Fp4Statistics statistics;
  statistics.add(view_of(Fp4Format::kMxfp4, 1, codes, std::vector<uint8_t>(16, 127)));
  for (const int64_t count : statistics.code_counts) EXPECT_EQ(count, 32);
  EXPECT_EQ(statistics.num_saturated(), 64);
  EXPECT_EQ(statistics.num_blocks, 16);
  EXPECT_EQ(statistics.num_zero_blocks, 0);
}

TEST(Fp4Statistics, CountsZeroBlocksOfEitherSignAndZeroScales) {
  std::vector<uint8_t> codes(4 * 8, 0x11);
  for (size_t i = 0; i < 8; ++i) codes[i] = 0x80;  // block 0: zeros of both signs
  Fp4Statistics statistics;
  statistics.add(view_of(Fp4Format::kNvfp4, 2, codes, {0x38, 0x38, 0x00, 0x38}));  // block 2: scale 0
  EXPECT_EQ(statistics.num_blocks, 4);
  EXPECT_EQ(statistics.num_zero_blocks, 2);
  EXPECT_EQ(statistics.exponent_counts, (std::map<int, int64_t>{{0, 3}}));
  // An e8m0 byte of 0 is 2^-127, not 0.
  Fp4Statistics mxfp4;
  mxfp4.add(view_of(Fp4Format::kMxfp4, 1, std::vector<uint8_t>(16, 0x11), {0}));
  EXPECT_EQ(mxfp4.num_zero_blocks, 0);
  EXPECT_EQ(mxfp4.exponent_counts, (std::map<int, int64_t>{{-127, 1}}));
}

TEST(Fp4Statistics, ExponentsIncludeTheTensorScale) {
  Fp4Statistics statistics;
  // e4m3 0x40 = 2, 0x47 = 3.75, 0x48 = 4; times 2^-10.
  statistics.add(view_of(Fp4Format::kNvfp4, 1, std::vector<uint8_t>(24, 0x11), {0x40, 0x47, 0x48}, 0x1p-10f));
  EXPECT_EQ(statistics.exponent_counts, (std::map<int, int64_t>{{-9, 2}, {-8, 1}}));
  EXPECT_EQ(statistics.exponent_quantile(0), -9);
  EXPECT_EQ(statistics.exponent_quantile(0.5), -9);
  EXPECT_EQ(statistics.exponent_quantile(1), -8);
  EXPECT_EQ(Fp4Statistics{}.exponent_quantile(0.5), 0);
}

TEST(Fp4Statistics, FollowsStrides) {
  std::vector<uint8_t> codes(4 * 16, 0x77);
  for (size_t i = 0; i < 64; ++i)
    if (i / 16 % 2 == 0) codes[i] = 0;
  const std::vector<uint8_t> scales = {120, 130, 121, 131};
  Fp4MatrixView even = view_of(Fp4Format::kMxfp4, 4, codes, scales);
  even.rows = 2;
  even.code_stride_bytes *= 2;
  even.scale_stride_bytes *= 2;
  Fp4Statistics statistics;
  statistics.add(even);
  EXPECT_EQ(statistics.code_counts[0], 64);
  EXPECT_EQ(statistics.num_zero_blocks, 2);
  EXPECT_EQ(statistics.exponent_counts, (std::map<int, int64_t>{{-7, 1}, {-6, 1}}));
}

TEST(ExpertStatistics, FindsGateAndUpScalesThatDiffer) {
  const std::vector<uint8_t> codes(8, 0x11), scales = {0x38};
  const auto matrix = [&](float scale) { return view_of(Fp4Format::kNvfp4, 1, codes, scales, scale); };
  ExpertStatistics statistics;
  statistics.add({.gate = matrix(1), .up = matrix(1), .down = matrix(3)});
  EXPECT_EQ(statistics.num_gate_up_mismatches, 0);
  EXPECT_EQ(statistics.max_gate_up_ratio, 1);
  statistics.add({.gate = matrix(1), .up = matrix(4), .down = matrix(3)});
  statistics.add({.gate = matrix(2), .up = matrix(1), .down = matrix(3)});
  EXPECT_EQ(statistics.num_gate_up_mismatches, 2);
  EXPECT_EQ(statistics.max_gate_up_ratio, 4);
  EXPECT_EQ(statistics.down.num_blocks, 3);
}

}  // namespace
}  // namespace fp4moe
