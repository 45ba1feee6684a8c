#include "formats/scale_layout.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "formats/sm90_interleave.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

// rows x groups, including partial tiles, single rows and empty matrices.
const int64_t kRows[] = {0, 1, 7, 8, 9, 31, 32, 33, 64, 127, 128, 129, 257};
const int64_t kGroups[] = {1, 2, 3, 4, 5, 8, 90};

std::vector<uint8_t> counted(int64_t n) {
  std::vector<uint8_t> bytes(static_cast<size_t>(n));
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<uint8_t>(1 + i % 255);  // never 0, the padding's value
  return bytes;
}

// Iterates over a buffer of row tiles x group tiles of [row_inner, row_outer, 4] in storage order and
// compares each element inside the matrix with offset().
template <class L>
void expect_storage_order(const L& layout, int64_t row_inner, int64_t row_outer) {
  const int64_t tile_rows = row_inner * row_outer;
  int64_t at = 0;
  for (int64_t row_tile = 0; row_tile * tile_rows < layout.rows; ++row_tile)
    for (int64_t group_tile = 0; group_tile * 4 < layout.groups; ++group_tile)
      for (int64_t inner = 0; inner < row_inner; ++inner)
        for (int64_t outer = 0; outer < row_outer; ++outer)
          for (int64_t g4 = 0; g4 < 4; ++g4, ++at) {
            const int64_t m = row_tile * tile_rows + outer * row_inner + inner, g = group_tile * 4 + g4;
            if (m >= layout.rows || g >= layout.groups) continue;
            ASSERT_EQ(layout.offset(m, g), at) << m << ", " << g;
          }
  EXPECT_EQ(layout.num_bytes(), at);
}

template <class L>
void expect_round_trip(const L& layout) {
  const LinearScales linear{layout.rows, layout.groups};
  const std::vector<uint8_t> src = counted(linear.num_bytes());
  std::vector<uint8_t> stored(layout.num_bytes(), 0xaa), back(src.size(), 0xaa);
  ASSERT_TRUE(convert_scales(linear, src.data(), layout, stored.data()).ok());
  ASSERT_TRUE(convert_scales(layout, stored.data(), linear, back.data()).ok());
  EXPECT_TRUE(same_bytes(back, src));
  int64_t num_zero = 0;
  for (uint8_t byte : stored) num_zero += byte == 0;
  EXPECT_EQ(num_zero, layout.num_bytes() - linear.num_bytes()) << "padding is zero and nothing else is";
}

TEST(ScaleLayout, LiteralOffsets) {
  const Swizzled128x4Scales wide{256, 8};
  EXPECT_EQ(wide.offset(0, 0), 0);
  EXPECT_EQ(wide.offset(1, 0), 16);
  EXPECT_EQ(wide.offset(32, 0), 4);
  EXPECT_EQ(wide.offset(33, 5), 533);
  EXPECT_EQ(wide.offset(130, 2), 1058);
  EXPECT_EQ((Swizzled8x4Scales{16, 8}.offset(9, 5)), 101);
  EXPECT_EQ((Sm90FoldedScales{128, 8}.offset(70, 5)), 865);
  EXPECT_EQ((Sm90ColumnScales{128, 8}.offset(70, 5)), 512 + 280 + 1);
  EXPECT_EQ((LinearScales{128, 8}.offset(70, 5)), 565);
}

TEST(ScaleLayout, OffsetsFollowTheStorageOrder) {
  for (int64_t rows : kRows)
    for (int64_t groups : kGroups) {
      expect_storage_order(Swizzled128x4Scales{rows, groups}, 32, 4);
      expect_storage_order(Swizzled8x4Scales{rows, groups}, 8, 1);
    }
  expect_storage_order(*Sm90FoldedScales::make(192, 12), 16, 4);
}

TEST(ScaleLayout, ConversionsAreInvertibleAndPaddingIsZero) {
  for (int64_t rows : kRows)
    for (int64_t groups : kGroups) {
      expect_round_trip(LinearScales{rows, groups});
      expect_round_trip(Swizzled128x4Scales{rows, groups});
      expect_round_trip(Swizzled8x4Scales{rows, groups});
    }
  for (int64_t rows : {0, 64, 192})
    for (int64_t groups : {4, 12}) {
      expect_round_trip(*Sm90FoldedScales::make(rows, groups));
      expect_round_trip(*Sm90ColumnScales::make(rows, groups));
    }
}

TEST(ScaleLayout, SwizzledToSwizzledEqualsTheWayOverLinear) {
  const Swizzled128x4Scales wide{130, 6};
  const Swizzled8x4Scales narrow{130, 6};
  const std::vector<uint8_t> linear = counted(130 * 6);
  std::vector<uint8_t> a(wide.num_bytes()), direct(narrow.num_bytes()), over(narrow.num_bytes());
  ASSERT_TRUE(convert_scales(LinearScales{130, 6}, linear.data(), wide, a.data()).ok());
  ASSERT_TRUE(convert_scales(wide, a.data(), narrow, direct.data()).ok());
  ASSERT_TRUE(convert_scales(LinearScales{130, 6}, linear.data(), narrow, over.data()).ok());
  EXPECT_TRUE(same_bytes(direct, over));
}

TEST(ScaleLayout, DifferentShapesAndSizesThatDoNotFitAreRefused) {
  uint8_t none = 7;
  const Status status = convert_scales(LinearScales{8, 4}, &none, Swizzled128x4Scales{8, 5}, &none);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("[8, 4] in layout linear cannot become [8, 5] in layout swizzled_128x4"),
            std::string::npos)
      << status.message();
  EXPECT_EQ(none, 7);
  for (auto [rows, groups] : {std::pair<int64_t, int64_t>{96, 4}, {64, 6}, {-64, 4}})
    EXPECT_EQ(Sm90FoldedScales::make(rows, groups).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Sm90ColumnScales::make(7, 6).status().code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(Sm90ColumnScales::make(7, 8).ok());
}

TEST(BatchedScales, MmaViewNamesTheSameBytes) {
  const BatchedScales layout{3, 130, 6};
  const MmaScaleView view = MmaScaleView::of(layout);
  EXPECT_EQ(view.shape, (std::array<int64_t, 6>{32, 4, 2, 4, 2, 3}));
  EXPECT_EQ(view.strides, (std::array<int64_t, 6>{16, 4, 1024, 1, 512, 2048}));
  EXPECT_EQ(std::accumulate(view.shape.begin(), view.shape.end(), int64_t{1}, std::multiplies<>()),
            layout.num_bytes());
  for (int64_t e = 0; e < 3; ++e)
    for (int64_t m = 0; m < 130; ++m)
      for (int64_t g = 0; g < 6; ++g)
        ASSERT_EQ(view.offset(MmaScaleView::index(e, m, g)), layout.offset(e, m, g))
            << e << ", " << m << ", " << g;
}

TEST(BatchedScales, EqualsOneTallMatrixOnlyForRowsOfWholeTiles) {
  EXPECT_EQ((BatchedScales{2, 128, 4}.offset(1, 0, 0)), (Swizzled128x4Scales{256, 4}.offset(128, 0)));
  EXPECT_NE((BatchedScales{2, 120, 4}.offset(1, 0, 0)), (Swizzled128x4Scales{240, 4}.offset(120, 0)));
}

TEST(BatchedScales, MaskedCopyTouchesValidRowsOnly) {
  const BatchedScales layout{4, 130, 6};
  const int32_t num_rows[] = {130, 0, 1, 33};
  const std::vector<uint8_t> linear = counted(4 * 130 * 6);
  std::vector<uint8_t> batched(layout.num_bytes(), 0), back(linear.size(), 0);
  copy_masked_scales_to_batched(layout, linear.data(), num_rows, batched.data());
  copy_masked_scales_to_linear(layout, batched.data(), num_rows, back.data());
  int64_t num_written = 0;
  for (uint8_t byte : batched) num_written += byte != 0;
  EXPECT_EQ(num_written, (130 + 0 + 1 + 33) * 6);
  for (int64_t e = 0; e < 4; ++e)
    for (int64_t m = 0; m < 130; ++m)
      for (int64_t g = 0; g < 6; ++g) {
        const int64_t at = (e * 130 + m) * 6 + g;
        ASSERT_EQ(back[at], m < num_rows[e] ? linear[at] : 0) << e << ", " << m << ", " << g;
      }
}

TEST(ExpertPackedScales, ExpertsNeverOverlapWhateverTheCounts) {
  EXPECT_EQ(ExpertPackedScales::first_row(0, 0), 0);
  EXPECT_EQ(ExpertPackedScales::first_row(1, 1), 128);
  EXPECT_EQ(ExpertPackedScales::first_row(2, 3), 384);
  std::vector<int64_t> one_token_each(301);
  std::iota(one_token_each.begin(), one_token_each.end(), 0);
  const std::vector<std::vector<int64_t>> cases = {
      one_token_each,          {0}, {0, 0, 0}, {0, 1, 2, 3}, {0, 128, 256}, {0, 127, 129, 129, 500},
      {0, 0, 1000, 1000, 1001}};
  for (const auto& first_token : cases) {
    const ExpertPackedScales layout{first_token, 5};
    const std::vector<uint8_t> linear = counted(first_token.back() * 5);
    std::vector<uint8_t> packed(layout.num_bytes(), 0xaa), back(linear.size());
    pack_expert_scales(layout, linear.data(), packed.data());
    unpack_expert_scales(layout, packed.data(), back.data());
    EXPECT_TRUE(same_bytes(back, linear));
    int64_t num_zero = 0;
    for (uint8_t byte : packed) num_zero += byte == 0;
    EXPECT_EQ(num_zero, layout.num_bytes() - static_cast<int64_t>(linear.size()));
    for (int64_t e = 0; e < layout.num_experts(); ++e) {
      const int64_t first = ExpertPackedScales::first_row(e, first_token[e]);
      EXPECT_EQ(first % 128, 0);
      EXPECT_GE(ExpertPackedScales::first_row(e + 1, first_token[e + 1]) - first,
                round_up(first_token[e + 1] - first_token[e], 128));
    }
  }
}

}  // namespace
}  // namespace fp4moe
