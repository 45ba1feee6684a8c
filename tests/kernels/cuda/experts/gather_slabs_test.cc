// Compares gathering tokens into slabs with a plain loop.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "device/stream.h"
#include "kernels/cuda/device_array.h"
#include "kernels/cuda/experts/sm90_wide_gemm.h"
#include "kernels/cuda/layout/token_slabs.h"

namespace fp4moe {
namespace {

struct Case {
  int64_t num_tokens, topk, num_experts, cols;
};

// Rows by expert in slot order; every fourth slot or so has no row.
struct Packed {
  std::vector<int32_t> offsets = {0}, slot_of_row, row_of_slot;

  explicit Packed(const Case& c) : row_of_slot(static_cast<size_t>(c.num_tokens * c.topk), -1) {
    std::mt19937 random(7);
    std::vector<int64_t> experts(row_of_slot.size());
    for (int64_t& e : experts)
      e = static_cast<int64_t>(random() % static_cast<uint32_t>(c.num_experts + 1 + c.num_experts / 3));
    for (int64_t e = 0; e < c.num_experts; ++e) {
      for (size_t slot = 0; slot < experts.size(); ++slot) {
        if (experts[slot] != e) continue;
        row_of_slot[slot] = static_cast<int32_t>(slot_of_row.size());
        slot_of_row.push_back(static_cast<int32_t>(slot));
      }
      offsets.push_back(static_cast<int32_t>(slot_of_row.size()));
    }
  }
};

// Rows of slabs that belong to no packed row keep the poison.
std::vector<uint16_t> expected_slabs(const Case& c, const Packed& packed, const std::vector<uint16_t>& x) {
  const int64_t rows = num_slab_rows(c.num_tokens * c.topk, 0, c.num_experts), slabs = num_slabs(c.cols * 2);
  std::vector<uint16_t> all = poisoned<uint16_t>(slabs_bytes(rows, c.cols * 2) / 2);
  for (int64_t e = 0; e < c.num_experts; ++e) {
    const int64_t first = packed.offsets[static_cast<size_t>(e)],
                  last = packed.offsets[static_cast<size_t>(e) + 1];
    for (int64_t row = first; row < last; ++row) {
      const int64_t token = packed.slot_of_row[static_cast<size_t>(row)] / c.topk,
                    to = (first + 7) / 8 * 8 + 8 * e + row - first;
      for (int64_t col = 0; col < slabs * 64; ++col) {
        const int64_t piece = col % 64 / 8 ^ to % 8;
        all[static_cast<size_t>(((col / 64 * rows + to) * 8 + piece) * 8 + col % 8)] =
            col < c.cols ? x[static_cast<size_t>(token * c.cols + col)] : uint16_t{0};
      }
    }
  }
  return all;
}

TEST(GatherSlabs, MatchesAPlainLoop) {
  Stream stream = std::move(*Stream::make());
  const StreamScope scope(stream);
  for (const Case& c : {Case{1, 1, 1, 8},
                        {1, 4, 32, 2880},
                        {7, 2, 5, 64},
                        {8, 6, 3, 72},
                        {9, 33, 40, 1032},
                        {65, 8, 256, 1024},
                        {300, 4, 32, 2880}}) {
    SCOPED_TRACE(std::to_string(c.num_tokens) + " tokens, top-" + std::to_string(c.topk) + " of " +
                 std::to_string(c.num_experts) + ", " + std::to_string(c.cols) + " columns");
    const Packed packed(c);
    std::vector<uint16_t> x(static_cast<size_t>(c.num_tokens * c.cols));
    std::mt19937 random(3);
    for (uint16_t& v : x) v = static_cast<uint16_t>(random());
    const std::vector<uint16_t> expected = expected_slabs(c, packed, x);
    const DeviceArray<uint16_t> device_x(x), slabs(std::ssize(expected));
    const DeviceArray<int32_t> offsets(packed.offsets), slot_of_row(packed.slot_of_row),
        row_of_slot(packed.row_of_slot);
    gather_token_slabs({.x = reinterpret_cast<const bf16*>(device_x.data()),
                        .rows = {.max_rows = c.num_tokens * c.topk,
                                 .offsets = offsets.data(),
                                 .slot_of_row = slot_of_row.data(),
                                 .row_of_slot = row_of_slot.data()},
                        .num_experts = c.num_experts,
                        .num_tokens = c.num_tokens,
                        .topk = c.topk,
                        .cols = c.cols,
                        .slabs = reinterpret_cast<uint8_t*>(slabs.data())});
    const Status status = stream.synchronize();
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(slabs.values(), expected);
  }
}

}  // namespace
}  // namespace fp4moe
