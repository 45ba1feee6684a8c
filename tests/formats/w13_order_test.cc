#include "formats/w13_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "formats/fp4_matrix.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

std::vector<W13Order> all_orders() {
  std::vector<W13Order> orders;
  for (auto arrangement : {W13Arrangement::kGateUp, W13Arrangement::kUpGate, W13Arrangement::kGateUpPairs,
                           W13Arrangement::kUpGatePairs, W13Arrangement::kUpGateBlocks64})
    for (auto shuffle : {RowShuffle::kNone, RowShuffle::kBlocks32, RowShuffle::kBlocks16})
      orders.push_back({arrangement, shuffle});
  return orders;
}

// Returns labels of the rows of a matrix in `order`, such as "g0 g1 u0 u1".
std::string labels(W13Order order, int64_t intermediate_size, size_t num_shown) {
  const auto rows = w13_rows(order, intermediate_size);
  if (!rows.ok()) return rows.status().to_string();
  std::string text;
  for (size_t r = 0; r < std::min(num_shown, rows->size()); ++r) {
    const int64_t row = rows.value()[r];
    text += (r > 0 ? " " : "") + std::string(row < intermediate_size ? "g" : "u") +
            std::to_string(row % intermediate_size);
  }
  return text;
}

TEST(W13Order, Arrangements) {
  EXPECT_EQ(labels({W13Arrangement::kGateUp}, 3, 6), "g0 g1 g2 u0 u1 u2");
  EXPECT_EQ(labels({W13Arrangement::kUpGate}, 3, 6), "u0 u1 u2 g0 g1 g2");
  EXPECT_EQ(labels({W13Arrangement::kGateUpPairs}, 3, 6), "g0 u0 g1 u1 g2 u2");
  EXPECT_EQ(labels({W13Arrangement::kUpGatePairs}, 3, 6), "u0 g0 u1 g1 u2 g2");
}

TEST(W13Order, Blocks64AlternateUpAndGate) {
  const auto rows = w13_rows({W13Arrangement::kUpGateBlocks64}, 128);
  ASSERT_TRUE(rows.ok());
  const int64_t starts[] = {128, 0, 192, 64};  // up[0:64], gate[0:64], up[64:128], gate[64:128]
  for (int64_t r = 0; r < 256; ++r) EXPECT_EQ(rows.value()[r], starts[r / 64] + r % 64) << r;
}

TEST(W13Order, ShuffleTakesEveryFourthOrSecondRow) {
  const auto blocks32 = shuffle_rows(RowShuffle::kBlocks32, 64);
  const auto blocks16 = shuffle_rows(RowShuffle::kBlocks16, 32);
  ASSERT_TRUE(blocks32.ok() && blocks16.ok());
  const int64_t head32[] = {0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29, 2};
  const int64_t head16[] = {0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15};
  for (size_t j = 0; j < std::size(head32); ++j) {
    EXPECT_EQ(blocks32.value()[j], head32[j]);
    EXPECT_EQ(blocks32.value()[32 + j], 32 + head32[j]);
  }
  for (size_t j = 0; j < std::size(head16); ++j) {
    EXPECT_EQ(blocks16.value()[j], head16[j]);
    EXPECT_EQ(blocks16.value()[16 + j], 16 + head16[j]);
  }
}

TEST(W13Order, ShuffleFollowsTheInterleave) {
  EXPECT_EQ(labels({W13Arrangement::kUpGatePairs, RowShuffle::kBlocks32}, 32, 10),
            "u0 u2 u4 u6 u8 u10 u12 u14 g0 g2");
}

TEST(W13Order, EveryConversionIsABijectionThatItsReverseUndoes) {
  for (const W13Order from : all_orders())
    for (const W13Order to : all_orders())
      for (int64_t intermediate_size : {64, 192}) {
        const auto there = w13_conversion(from, to, intermediate_size);
        const auto back = w13_conversion(to, from, intermediate_size);
        ASSERT_TRUE(there.ok() && back.ok());
        EXPECT_EQ(back.value(), inverse(there.value()))
            << w13_order_name(from) << " to " << w13_order_name(to);
        RowPermutation sorted = there.value();
        std::sort(sorted.begin(), sorted.end());
        for (size_t r = 0; r < sorted.size(); ++r) ASSERT_EQ(sorted[r], static_cast<int64_t>(r));
        if (from == to) {
          EXPECT_EQ(there.value(), sorted) << "the identity";
        }
      }
}

TEST(W13Order, ConversionKeepsWhatARowIs) {
  for (const W13Order from : all_orders())
    for (const W13Order to : all_orders()) {
      const RowPermutation rows_from = *w13_rows(from, 64), rows_to = *w13_rows(to, 64);
      const RowPermutation source_row = *w13_conversion(from, to, 64);
      for (size_t r = 0; r < source_row.size(); ++r) ASSERT_EQ(rows_from[source_row[r]], rows_to[r]);
    }
}

TEST(W13Order, PermutingCodesAndScalesPermutesValues) {
  const int64_t intermediate_size = 64, rows = 128, cols = 64;
  std::vector<uint8_t> codes(rows * cols / 2), scales(rows * cols / 16);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 2654435761u >> 24);
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<uint8_t>(i * 40503u >> 4) & 0x3f;
  const RowPermutation source_row = *w13_conversion(
      {W13Arrangement::kGateUp}, {W13Arrangement::kUpGateBlocks64, RowShuffle::kBlocks32}, intermediate_size);
  std::vector<uint8_t> new_codes(codes.size()), new_scales(scales.size());
  permute_rows(codes.data(), source_row, cols / 2, new_codes.data());
  permute_rows(scales.data(), source_row, cols / 16, new_scales.data());
  const auto view = [&](const auto& c, const auto& s) {
    return Fp4MatrixView{Fp4Format::kNvfp4, rows, cols, c.data(), s.data(), cols / 2, cols / 16, 1};
  };
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c)
      ASSERT_EQ(fp4_at(view(new_codes, new_scales), r, c), fp4_at(view(codes, scales), source_row[r], c));
  std::vector<uint8_t> restored(codes.size());
  permute_rows(new_codes.data(), inverse(source_row), cols / 2, restored.data());
  EXPECT_TRUE(same_bytes(restored, codes));
}

TEST(W13Order, SizesThatAnOrderCannotHoldAreRefusedByName) {
  const struct {
    W13Order order;
    int64_t intermediate_size;
    const char* text;
  } cases[] = {
      {{W13Arrangement::kUpGateBlocks64}, 96, "up_gate_blocks64 cannot hold intermediate_size=96"},
      {{W13Arrangement::kUpGatePairs, RowShuffle::kBlocks32},
       24,
       "up_gate_pairs+shuffle32: cannot shuffle 48 rows"},
      {{W13Arrangement::kUpGatePairs, RowShuffle::kBlocks16},
       20,
       "up_gate_pairs+shuffle16: cannot shuffle 40 rows"},
      {{W13Arrangement::kGateUp}, 0, "gate_up cannot hold intermediate_size=0"},
      {{W13Arrangement::kUpGate}, -1, "up_gate cannot hold intermediate_size=-1"},
      {{W13Arrangement::kGateUpPairs}, int64_t{1} << 62, "gate_up_pairs cannot hold"},
  };
  for (const auto& c : cases) {
    const Status status = w13_rows(c.order, c.intermediate_size).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(c.text), std::string::npos) << status.message();
    EXPECT_FALSE(w13_conversion({}, c.order, c.intermediate_size).ok());
    EXPECT_FALSE(w13_conversion(c.order, {}, c.intermediate_size).ok());
  }
}

}  // namespace
}  // namespace fp4moe
