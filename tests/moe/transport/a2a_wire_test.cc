// Tests rows on the wire: sizes and round trips.
#include "moe/transport/a2a_wire.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "formats/nvfp4.h"
#include "kernels/dense_case.h"

namespace fp4moe {
namespace {

TEST(A2aWireTest, PublishedSizes) {
  EXPECT_EQ(wire_row_bytes(WireFormat::kBf16, 7168), 14336);
  EXPECT_EQ(wire_row_bytes(WireFormat::kF32, 7168), 28672);
  EXPECT_EQ(wire_row_bytes(WireFormat::kFp8Block, 7168), 7168 + 4 * 7168 / 128);
  EXPECT_EQ(wire_row_bytes(WireFormat::kFp8Block, 2880), 2880 + 4 * 23);  // the last group is short
  EXPECT_EQ(wire_row_bytes(WireFormat::kFp8Plain, 7168), 7168);
  EXPECT_EQ(wire_row_bytes(WireFormat::kNvfp4, 7168), 7168 / 2 + 7168 / 16 + 4);
}

TEST(A2aWireTest, ActivationsComeBackExactly) {
  Random random(1);
  const std::vector<float> x = random.normal(208);
  const std::vector<bf16> b = to_bf16(x);
  std::vector<uint8_t> wire(4 * 208);
  std::vector<float> out(208);
  std::vector<bf16> out16(208);
  WireEncoder{WireFormat::kF32}.encode(x.data(), DType::kF32, 208, wire.data());
  EXPECT_EQ(decode_wire_row(WireFormat::kF32, wire.data(), 208, DType::kF32, out.data()), 1);
  EXPECT_EQ(out, x);
  WireEncoder{WireFormat::kBf16}.encode(b.data(), DType::kBF16, 208, wire.data());
  EXPECT_EQ(decode_wire_row(WireFormat::kBf16, wire.data(), 208, DType::kBF16, out16.data()), 1);
  EXPECT_EQ(out16, b);
  // f32 results sent as bf16 are rounded once.
  WireEncoder{WireFormat::kBf16}.encode(x.data(), DType::kF32, 208, wire.data());
  std::vector<float> sum(208, 1.0f);
  add_wire_row(WireFormat::kBf16, wire.data(), 16, 192, 0.5f, sum.data());
  for (size_t i = 0; i < 192; ++i) ASSERT_EQ(sum[i], 1.0f + 0.5f * bf16_to_float(b[16 + i]));
  EXPECT_EQ(sum[192], 1.0f);
}

TEST(A2aWireTest, Nvfp4ValuesAreExactInBf16) {
  Random random(2);
  const std::vector<bf16> x = to_bf16(random.normal(64));
  for (const bool per_token : {false, true}) {
    const EncodeScale gs{2688.0f / 5};
    std::vector<uint8_t> wire(64), codes(32), scales(4);
    WireEncoder{WireFormat::kNvfp4, per_token, gs}.encode(x.data(), DType::kBF16, 64, wire.data());
    std::vector<bf16> out(64);
    std::vector<float> exact(64);
    const float scale = decode_wire_row(WireFormat::kNvfp4, wire.data(), 64, DType::kBF16, out.data());
    const DecodeScale whole =
        per_token ? nvfp4_quantize_row_per_token(x.data(), 64, codes.data(), scales.data()) : to_decode(gs);
    if (!per_token) nvfp4_quantize_row(x.data(), 64, gs, codes.data(), scales.data());
    EXPECT_EQ(scale, whole.value);
    nvfp4_dequantize_row(codes.data(), scales.data(), 64, DecodeScale{1}, exact.data());
    for (size_t i = 0; i < 64; ++i) ASSERT_EQ(bf16_to_float(out[i]), exact[i]);
  }
}

TEST(A2aWireTest, PlainFp8Saturates) {
  const float x[4] = {1000, -std::numeric_limits<float>::infinity(), 0.3f, std::nanf("")};
  uint8_t wire[4];
  float out[4];
  WireEncoder{WireFormat::kFp8Plain}.encode(x, DType::kF32, 4, wire);
  decode_wire_row(WireFormat::kFp8Plain, wire, 4, DType::kF32, out);
  EXPECT_EQ(out[0], 448);
  EXPECT_EQ(out[1], -448);
  EXPECT_EQ(out[2], 0.3125f);
  EXPECT_TRUE(std::isnan(out[3]));
}

}  // namespace
}  // namespace fp4moe
