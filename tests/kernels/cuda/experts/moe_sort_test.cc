// Compares sorting slots by expert, and combining the experts' rows into tokens, with plain loops.
#include "kernels/cuda/experts/moe_sort.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "device/stream.h"
#include "kernels/cuda/device_array.h"

namespace fp4moe {
namespace {

class MoeSort : public testing::Test {
 protected:
  Stream stream_ = std::move(*Stream::make());
  StreamScope scope_{stream_};

  struct Sorted {
    std::vector<int32_t> offsets, counts, slot_of_row, row_of_slot, progress;
  };

  struct Form {
    bool has_scratch;
    int64_t capacity = 0;
    bool has_shared = false;
  };

  Sorted sort(const std::vector<int32_t>& ids, int64_t topk, int64_t first, int64_t num_experts,
              const Form& form) {
    const auto [has_scratch, capacity, has_shared] = form;
    const auto ints = poisoned<int32_t>;
    const int64_t shared_rows = has_shared ? std::ssize(ids) / topk : 0;
    const int64_t max_rows = capacity > 0 ? capacity * num_experts : std::ssize(ids) + shared_rows;
    const DeviceArray<int32_t> device_ids(ids), scratch_memory(ints(kSortBlocks * num_experts));
    const DeviceArray<int32_t> offsets(ints(num_experts + 1)), counts(ints(num_experts + has_shared)),
        progress(ints(num_experts + 1 + has_shared));
    const DeviceArray<int32_t> slot_of_row(ints(max_rows)), row_of_slot(ints(std::ssize(ids)));
    MoeSortArgs args;
    args.ids = device_ids.data();
    args.num_tokens = std::ssize(ids) / topk;
    args.topk = topk;
    args.first_expert = first;
    args.num_experts = num_experts;
    args.has_shared = has_shared;
    args.rows = {.max_rows = max_rows,
                 .capacity = capacity,
                 .offsets = offsets.data(),
                 .counts = counts.data(),
                 .slot_of_row = slot_of_row.data(),
                 .row_of_slot = row_of_slot.data(),
                 .progress = progress.data()};
    if (has_scratch) args.scratch = scratch_memory.data();
    moe_sort(args);
    const Status status = stream_.synchronize();
    EXPECT_TRUE(status.ok()) << status.message();
    return {offsets.values(), counts.values(), slot_of_row.values(), row_of_slot.values(), progress.values()};
  }

  // Slots past the capacity are dropped but counted; offsets are not written.
  void expect_masked(const std::vector<int32_t>& ids, int64_t topk, int64_t first, int64_t num_experts,
                     int64_t capacity) {
    SCOPED_TRACE("capacity " + std::to_string(capacity));
    std::vector<int32_t> counts(static_cast<size_t>(num_experts)), rows(ids.size(), -1);
    std::vector<int32_t> slots(static_cast<size_t>(num_experts * capacity), -1);
    for (size_t i = 0; i < ids.size(); ++i) {
      const int64_t e = ids[i] - first;
      if (e < 0 || e >= num_experts) continue;
      const int64_t within = counts[static_cast<size_t>(e)]++;
      if (within >= capacity) continue;
      rows[i] = static_cast<int32_t>(e * capacity + within);
      slots[static_cast<size_t>(rows[i])] = static_cast<int32_t>(i);
    }
    for (const bool scratch : {false, true}) {
      const Sorted sorted = sort(ids, topk, first, num_experts, {scratch, capacity});
      EXPECT_EQ(sorted.offsets, poisoned<int32_t>(num_experts + 1));
      EXPECT_EQ(sorted.counts, counts);
      EXPECT_EQ(sorted.slot_of_row, slots);
      EXPECT_EQ(sorted.row_of_slot, rows);
    }
  }

  void expect_sorted(const std::vector<int32_t>& ids, int64_t topk, int64_t first, int64_t num_experts,
                     const std::string& name) {
    SCOPED_TRACE(name);
    std::vector<int32_t> counts(static_cast<size_t>(num_experts)), offsets{0}, slots, rows(ids.size(), -1);
    for (int64_t e = 0; e < num_experts; ++e) {
      for (size_t i = 0; i < ids.size(); ++i)
        if (ids[i] == first + e) {
          rows[i] = static_cast<int32_t>(slots.size());
          slots.push_back(static_cast<int32_t>(i));
          ++counts[static_cast<size_t>(e)];
        }
      offsets.push_back(static_cast<int32_t>(slots.size()));
    }
    slots.resize(ids.size(), -1);  // rows past the last are not written
    for (const bool scratch : {false, true}) {
      const Sorted sorted = sort(ids, topk, first, num_experts, {scratch});
      EXPECT_EQ(sorted.offsets, offsets);
      EXPECT_EQ(sorted.counts, counts);
      EXPECT_EQ(sorted.slot_of_row, slots);
      EXPECT_EQ(sorted.row_of_slot, rows);
      EXPECT_EQ(sorted.progress, std::vector<int32_t>(static_cast<size_t>(num_experts + 1), 0));
    }
    const int32_t most = *std::max_element(counts.begin(), counts.end());
    for (const int64_t capacity : {int64_t{7}, int64_t{most} + 3})
      expect_masked(ids, topk, first, num_experts, capacity);
    // The shared expert's rows follow those of all slots, local or not.
    offsets.back() = static_cast<int32_t>(ids.size());
    counts.push_back(static_cast<int32_t>(std::ssize(ids) / topk));
    for (int32_t t = 0; t < counts.back(); ++t) slots.push_back(t * static_cast<int32_t>(topk));
    for (const bool scratch : {false, true}) {
      const Sorted sorted = sort(ids, topk, first, num_experts, {scratch, 0, /*has_shared=*/true});
      EXPECT_EQ(sorted.offsets, offsets);
      EXPECT_EQ(sorted.counts, counts);
      EXPECT_EQ(sorted.slot_of_row, slots);
      EXPECT_EQ(sorted.row_of_slot, rows);
      EXPECT_EQ(sorted.progress, std::vector<int32_t>(static_cast<size_t>(num_experts + 2), 0));
    }
  }
};

TEST_F(MoeSort, SortsUniformIds) {
  std::mt19937 rng(1);
  for (const int64_t num_tokens : {0, 1, 3, 31, 33, 257, 1025, 4099})
    for (const int64_t num_experts : {1, 8, 33, 256}) {
      std::vector<int32_t> ids(static_cast<size_t>(num_tokens * 5));
      for (int32_t& id : ids) id = static_cast<int32_t>(rng() % static_cast<uint32_t>(num_experts));
      expect_sorted(ids, 5, 0, num_experts,
                    std::to_string(num_tokens) + " tokens, " + std::to_string(num_experts) + " experts");
    }
}

TEST_F(MoeSort, DropsForeignIdsAndToleratesDuplicates) {
  std::mt19937 rng(2);
  for (const int64_t num_tokens : {2, 100, 3000}) {
    std::vector<int32_t> ids(static_cast<size_t>(num_tokens * 4));
    for (int32_t& id : ids) id = static_cast<int32_t>(rng() % 48) - 8;
    ids[0] = INT32_MIN, ids[1] = INT32_MAX, ids[2] = ids[3] = 17;
    expect_sorted(ids, 4, 16, 12, std::to_string(num_tokens) + " tokens");
  }
}

TEST_F(MoeSort, SortsSkewedIds) {
  expect_sorted(std::vector<int32_t>(30000, 5), 3, 0, 32, "all to one expert");
  expect_sorted(std::vector<int32_t>(30000, 99), 3, 0, 32, "none local");
  expect_sorted(std::vector<int32_t>(64, 31), 2, 0, 32, "all to the last expert");
}

TEST_F(MoeSort, SortsAsManySlotsAsALayerHas) {
  std::mt19937 rng(3);
  std::vector<int32_t> ids(65536);
  for (int32_t& id : ids) id = static_cast<int32_t>(rng() % 300 * (rng() % 300) / 300);
  expect_sorted(ids, 8, 0, 256, "65536 slots");
}

class MoeCombine : public MoeSort {};

TEST_F(MoeCombine, SumsInTopKOrder) {
  std::mt19937 rng(4);
  std::normal_distribution<float> normal;
  const int64_t num_tokens = 37, topk = 5, hidden = 1056, num_rows = 150;
  std::vector<int32_t> rows(static_cast<size_t>(num_tokens * topk));
  for (int32_t& row : rows) row = static_cast<int32_t>(rng() % num_rows) - (rng() % 4 == 0 ? 1000 : 0);
  for (int32_t& row : rows) row = row < 0 ? -1 : row;
  std::vector<float> weights(rows.size()), y(static_cast<size_t>(num_rows * hidden)),
      old(num_tokens * hidden);
  std::vector<bf16> y_bf16;
  for (float& w : weights) w = normal(rng);
  for (float& v : y) y_bf16.push_back(float_to_bf16(v = normal(rng)));
  for (float& v : old) v = normal(rng);
  const DeviceArray<int32_t> device_rows(rows);
  const DeviceArray<float> device_weights(weights), device_y(y);
  const DeviceArray<bf16> device_y_bf16(y_bf16);
  for (const bool half : {false, true})
    for (const bool accumulate : {false, true}) {
      const DeviceArray<float> out(accumulate ? old : std::vector<float>(old.size(), NAN));
      const DeviceArray<bf16> out_bf16(poisoned<bf16>(num_tokens * hidden));
      MoeCombineArgs args{.y = half ? nullptr : device_y.data(),
                          .y_bf16 = half ? device_y_bf16.data() : nullptr,
                          .row_of_slot = device_rows.data(),
                          .weights = device_weights.data(),
                          .num_tokens = num_tokens,
                          .topk = topk,
                          .hidden_size = hidden,
                          .out = out.data(),
                          .accumulate = accumulate,
                          .out_bf16 = out_bf16.data()};
      moe_combine(args);
      ASSERT_TRUE(stream_.synchronize().ok());
      const std::vector<float> got = out.values();
      const std::vector<bf16> got_bf16 = out_bf16.values();
      for (int64_t t = 0; t < num_tokens; ++t)
        for (int64_t h = 0; h < hidden; ++h) {
          float sum = 0;
          for (int64_t k = 0; k < topk; ++k) {
            const size_t slot = static_cast<size_t>(t * topk + k);
            if (rows[slot] < 0) continue;
            const size_t at = static_cast<size_t>(rows[slot] * hidden + h);
            sum = std::fma(weights[slot], half ? bf16_to_float(y_bf16[at]) : y[at], sum);
          }
          const size_t at = static_cast<size_t>(t * hidden + h);
          ASSERT_EQ(got_bf16[at].bits, float_to_bf16(sum).bits) << t << ", " << h;
          ASSERT_EQ(got[at], accumulate ? sum + old[at] : sum) << t << ", " << h;
        }
    }
}

// A combine with added rows must equal a combine, then sigmoid_gate of the rows, then add.
TEST_F(MoeCombine, AddsGatedRowsLast) {
  std::mt19937 rng(5);
  std::normal_distribution<float> normal;
  const auto random = [&](int64_t n, float scale) {
    std::vector<float> values(static_cast<size_t>(n));
    for (float& v : values) v = bf16_to_float(float_to_bf16(scale * normal(rng)));
    return values;
  };
  const auto rounded = [](const std::vector<float>& values) {
    std::vector<bf16> out;
    for (const float v : values) out.push_back(float_to_bf16(v));
    return out;
  };
  ThreadPool pool(1);
  for (const int64_t hidden : {24, 1056, 2048, 7168}) {
    const int64_t num_tokens = 21, topk = 8, num_rows = 100;
    std::vector<int32_t> rows(static_cast<size_t>(num_tokens * topk));
    for (int32_t& row : rows) row = static_cast<int32_t>(rng() % (num_rows + 1)) - 1;
    const std::vector<float> y = random(num_rows * hidden, 1), added = random(num_tokens * hidden, 1),
                             old = random(num_tokens * hidden, 1);
    const DeviceArray<int32_t> device_rows(rows);
    const DeviceArray<float> weights(random(num_tokens * topk, 0.3f)), y_f32(y), added_f32(added),
        x(random(num_tokens * hidden, 1)), gate(random(hidden, 0.05f));
    const DeviceArray<bf16> y_bf16(rounded(y)), added_bf16(rounded(added));
    for (int i = 0; i < 16; ++i) {
      const bool y_is_bf16 = i & 1, added_is_bf16 = i & 2, accumulate = i & 4, has_gate = i & 8;
      const DeviceArray<float> out(old), expected(old), gated(added);
      MoeCombineArgs args{.y = y_is_bf16 ? nullptr : y_f32.data(),
                          .y_bf16 = y_is_bf16 ? y_bf16.data() : nullptr,
                          .row_of_slot = device_rows.data(),
                          .weights = weights.data(),
                          .num_tokens = num_tokens,
                          .topk = topk,
                          .hidden_size = hidden,
                          .out = expected.data(),
                          .accumulate = accumulate};
      moe_combine(args);
      const DenseOps& ops = *cuda_dense_ops();
      if (has_gate) ops.sigmoid_gate({x.data(), gate.data(), gated.data(), num_tokens, hidden}, pool);
      ops.add({gated.data(), expected.data(), num_tokens * hidden}, pool);
      args.out = out.data();
      args.added = {.rows = added_is_bf16 ? nullptr : added_f32.data(),
                    .rows_bf16 = added_is_bf16 ? added_bf16.data() : nullptr,
                    .gate = has_gate ? gate.data() : nullptr,
                    .x = x.data()};
      moe_combine(args);
      ASSERT_TRUE(stream_.synchronize().ok());
      ASSERT_EQ(out.values(), expected.values()) << "H " << hidden << ", case " << i;
    }
  }
}

}  // namespace
}  // namespace fp4moe
