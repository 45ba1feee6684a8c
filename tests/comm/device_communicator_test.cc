// Compares the sums and gathers of ranks on GPUs with loops on the host, bit for bit. If the machine has
// fewer GPUs than ranks, several ranks share a GPU.
#include "comm/device_communicator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "comm/gpu_ranks.h"
#include "device/graph.h"
#include "formats/bf16.h"
#include "kernels/device_moe.h"
#include "kernels/ops.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

enum class Sent { kF32, kBf16 };

// Returns out plus the sum over ranks, as specified in the header of all_reduce.cu.
std::vector<float> expected_sum(const std::vector<std::vector<float>>& partials, std::vector<float> out,
                                Sent sent = Sent::kF32) {
  for (size_t i = 0; i < out.size(); ++i) {
    float sum = 0;
    for (const auto& partial : partials)
      sum += sent == Sent::kBf16 ? bf16_to_float(float_to_bf16(partial[i])) : partial[i];
    out[i] += sum;
  }
  return out;
}

// The operands of one sum on all ranks.
struct Sum {
  std::vector<std::vector<float>> partials;
  std::vector<float> before;
  std::vector<Buffer> partial, out;

  Sum(TestGroup& group, int64_t n, uint64_t seed) : before(random_floats(n, seed)) {
    for (int r = 0; r < group.size(); ++r)
      partials.push_back(random_floats(n, seed + 1 + static_cast<uint64_t>(r)));
  }
  void upload(TestGroup& group) {
    partial.clear(), out.clear();
    group.for_each([&](int r, DeviceCommunicator&) {
      partial.push_back(on_device(partials[static_cast<size_t>(r)]));
      out.push_back(on_device(before));
    });
  }
  int64_t n() const { return std::ssize(before); }
  void enqueue(TestGroup& group) {
    group.for_each([&](int r, DeviceCommunicator& rank) {
      const auto i = static_cast<size_t>(r);
      rank.add_all_reduced({"sum", 7}, partial[i].as<float>(), out[i].as<float>(), n());
    });
  }
  void check(TestGroup& group, const std::string& what, Sent sent = Sent::kF32) {
    const std::vector<float> expected = expected_sum(partials, before, sent);
    group.for_each([&](int r, DeviceCommunicator&) {
      EXPECT_TRUE(same_bits(from_device<float>(out[static_cast<size_t>(r)]), expected))
          << what << ", rank " << r;
    });
  }
};

class DeviceRanks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DeviceRanks, testing::Values(1, 2, 3, 4, 8));

TEST_P(DeviceRanks, SumsHaveTheHostsBits) {
  TestGroup group(GetParam(), {256, 48 << 10, 128});
  uint64_t seed = 1;
  // One vector, a row, a remainder, the largest single exchange, several pieces, and two exchanges for R >=
  // 3.
  for (const int64_t n : {4, 2880, 4 * 1021, 12 << 10, 40000, 64 * 2880, 300 * 2880}) {
    Sum sum(group, n, seed++ * 100);
    sum.upload(group);
    sum.enqueue(group);
    group.expect_ok();
    sum.check(group, std::to_string(n) + " elements");
  }
}

TEST_P(DeviceRanks, SumsOfBf16PartialsHaveTheHostsBits) {
  TestGroup group(GetParam(), {256, 48 << 10, 128});
  group.for_each([](int, DeviceCommunicator& rank) { rank.send_bf16_partials(); });
  uint64_t seed = 50;
  for (const int64_t n : {8, 2880, 8 * 1021, 24 << 10, 40000, 300 * 2880}) {
    Sum sum(group, n, seed++ * 100);
    sum.upload(group);
    sum.enqueue(group);
    group.expect_ok();
    sum.check(group, std::to_string(n) + " elements", Sent::kBf16);
  }
}

// Every NaN arrives, also those whose bits mark a word as unsent.
TEST_P(DeviceRanks, SumsOfNans) {
  for (const bool bf16_partials : {false, true}) {
    TestGroup group(GetParam());
    if (bf16_partials) group.for_each([](int, DeviceCommunicator& rank) { rank.send_bf16_partials(); });
    Sum sum(group, 32, 6);
    const uint32_t nans[] = {0xffffffffu, 0x7fffffffu, 0x7fc00000u, 0xffff0000u, 0xff80ffffu, 0x7f800001u};
    for (auto& partial : sum.partials)
      for (size_t i = 0; i < std::size(nans); ++i) std::memcpy(&partial[2 * i], &nans[i], 4);
    for (int again = 0; again < 4; ++again) {
      sum.upload(group);
      sum.enqueue(group);
      group.expect_ok();
      group.for_each([&](int r, DeviceCommunicator&) {
        const std::vector<float> out = from_device<float>(sum.out[static_cast<size_t>(r)]);
        for (size_t i = 0; i < out.size(); ++i)
          EXPECT_EQ(std::isnan(out[i]), i % 2 == 0 && i < 2 * std::size(nans)) << i << ", rank " << r;
      });
    }
  }
}

// A sum and its norm in one launch against the two operations.
TEST_P(DeviceRanks, FusedNormsHaveTheBitsOfSeparateOnes) {
  ThreadPool pool(1);
  for (const bool bf16_partials : {false, true}) {
    TestGroup group(GetParam(), {0, 128 << 10, 128});
    if (bf16_partials) group.for_each([](int, DeviceCommunicator& rank) { rank.send_bf16_partials(); });
    // One row, many rows, several pieces; a remainder of a warp; eight elements per thread.
    constexpr std::pair<int64_t, int64_t> kSizes[] = {{1, 2880}, {3, 7168},  {9, 40},
                                                      {2, 8192}, {11, 2880}, {40, 1000}};
    for (const auto& [rows, cols] : kSizes) {
      Sum fused(group, rows * cols, 77), separate(group, rows * cols, 77);
      fused.upload(group), separate.upload(group);
      // Everything is allocated before a rank waits for another: an allocation can wait for the GPU.
      std::vector<Buffer> weight, act[2], f32[2];
      group.for_each([&](int, DeviceCommunicator&) {
        weight.push_back(on_device(random_floats(cols, 5)));
        for (int k = 0; k < 2; ++k) {
          act[k].push_back(on_device(std::vector<uint16_t>(static_cast<size_t>(rows * cols), 0xabab)));
          f32[k].push_back(on_device(std::vector<float>(static_cast<size_t>(rows * cols), 9)));
        }
      });
      group.for_each([&](int r, DeviceCommunicator& rank) {
        const auto i = static_cast<size_t>(r);
        EXPECT_TRUE(rank.fuses_norm(rows, cols));
        const auto norm = [&](Sum& sum, int k) {
          return RmsNormArgs{sum.out[i].as<float>(),
                             weight[i].as<float>(),
                             1e-5f,
                             {act[k][i].data(), DType::kBF16, rows, cols},
                             f32[k][i].as<float>()};
        };
        rank.add_all_reduced_norm({"fused", 1}, fused.partial[i].as<float>(), fused.out[i].as<float>(),
                                  norm(fused, 0));
        rank.add_all_reduced({"separate", 2}, separate.partial[i].as<float>(), separate.out[i].as<float>(),
                             separate.n());
        cuda_dense_ops()->rms_norm(norm(separate, 1), pool);
      });
      group.expect_ok();
      const std::string what = std::to_string(rows) + " x " + std::to_string(cols);
      fused.check(group, what, bf16_partials ? Sent::kBf16 : Sent::kF32);
      group.for_each([&](int r, DeviceCommunicator&) {
        const auto i = static_cast<size_t>(r);
        EXPECT_EQ(from_device<uint16_t>(act[0][i]), from_device<uint16_t>(act[1][i])) << what;
        EXPECT_TRUE(same_bits(from_device<float>(f32[0][i]), from_device<float>(f32[1][i]))) << what;
      });
    }
  }
}

// A sum of experts' rows, which the sum's kernel weighs and adds, against moe_combine() and the sum. Slots
// without a row, rows without weights, pieces, and more rows than blocks.
TEST_P(DeviceRanks, FusedNormsCombineTheRowsOfExperts) {
  constexpr int64_t kTopk = 5;
  for (const bool bf16_partials : {false, true}) {
    TestGroup group(GetParam(), {0, 128 << 10, 128});
    if (bf16_partials) group.for_each([](int, DeviceCommunicator& rank) { rank.send_bf16_partials(); });
    constexpr std::pair<int64_t, int64_t> kSizes[] = {{1, 2880}, {9, 40}, {2, 8192}, {11, 2880}, {700, 64}};
    for (const auto& [rows, cols] : kSizes) {
      std::mt19937 random(static_cast<uint32_t>(rows * cols));
      std::vector<int32_t> row_of_slot(static_cast<size_t>(rows * kTopk));
      for (size_t i = 0; i < row_of_slot.size(); ++i)
        row_of_slot[i] = random() % 4 == 0 ? -1 : static_cast<int32_t>(random() % row_of_slot.size());
      struct Memory {
        Buffer y, row_of_slot, weights, partial, out[2], act[2], norm_weight;
      };
      std::vector<Memory> memory;
      group.for_each([&](int r, DeviceCommunicator&) {
        const auto seed = static_cast<uint64_t>(r);
        std::vector<bf16> y;
        for (const float v : random_floats(rows * kTopk * cols, 11 + seed)) y.push_back(float_to_bf16(v));
        Memory m{on_device(y),
                 on_device(row_of_slot),
                 on_device(random_floats(rows * kTopk, 12 + seed)),
                 on_device(random_floats(rows * cols, 13)),
                 {},
                 {},
                 on_device(random_floats(cols, 14))};
        for (int k = 0; k < 2; ++k) {
          m.out[k] = on_device(random_floats(rows * cols, 15));
          m.act[k] = on_device(std::vector<uint16_t>(static_cast<size_t>(rows * cols), 0xabab));
        }
        memory.push_back(std::move(m));
      });
      group.for_each([&](int r, DeviceCommunicator& rank) {
        const Memory& m = memory[static_cast<size_t>(r)];
        MoeCombineArgs combine{.y_bf16 = m.y.as<bf16>(),
                               .row_of_slot = m.row_of_slot.as<int32_t>(),
                               .weights = rows == 9 ? nullptr : m.weights.as<float>(),
                               .num_tokens = rows,
                               .topk = kTopk,
                               .hidden_size = cols};
        const auto norm = [&](int k) {
          return RmsNormArgs{.x = m.out[k].as<float>(),
                             .weight = m.norm_weight.as<float>(),
                             .eps = 1e-5f,
                             .out_act = {m.act[k].data(), DType::kBF16, rows, cols}};
        };
        rank.add_all_reduced_norm({"fused", 1}, combine, m.out[0].as<float>(), norm(0));
        combine.out = m.partial.as<float>();
        sm90_moe_ops()->combine(combine);
        rank.add_all_reduced_norm({"separate", 2}, combine.out, m.out[1].as<float>(), norm(1));
      });
      group.expect_ok();
      const std::string what = std::to_string(rows) + " x " + std::to_string(cols);
      for (const Memory& m : memory) {
        EXPECT_TRUE(same_bits(from_device<float>(m.out[0]), from_device<float>(m.out[1]))) << what;
        EXPECT_EQ(from_device<uint16_t>(m.act[0]), from_device<uint16_t>(m.act[1])) << what;
        EXPECT_FALSE(same_bits(from_device<float>(m.out[0]), random_floats(rows * cols, 15))) << what;
      }
    }
  }
}

TEST_P(DeviceRanks, SumsOfSpecialValues) {
  TestGroup group(GetParam());
  Sum sum(group, 16, 5);
  constexpr float kInf = std::numeric_limits<float>::infinity();
  sum.before = {-0.0f, -0.0f, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  for (int r = 0; r < group.size(); ++r)
    sum.partials[static_cast<size_t>(r)] = {
        -0.0f, 0, -0.0f, r == 0 ? kInf : 1, r == 0 ? 1e-45f : 0, 3e38f, 0, 0, 0, 0, 0, 0, 0, 0, 0, -0.0f};
  sum.upload(group);
  sum.enqueue(group);
  group.expect_ok();
  sum.check(group, "zeros, infinities, subnormals");
  sum.partials.back()[3] = std::numeric_limits<float>::quiet_NaN();
  sum.upload(group);
  sum.enqueue(group);
  group.expect_ok();
  group.for_each([&](int r, DeviceCommunicator&) {
    EXPECT_TRUE(std::isnan(from_device<float>(sum.out[static_cast<size_t>(r)])[3]));
  });
}

// Returns the offsets of parts with random widths, some empty, in words or 16-byte vectors.
std::vector<int64_t> random_parts(int num_ranks, int64_t unit, std::mt19937_64& random) {
  std::vector<int64_t> first = {0};
  for (int r = 0; r < num_ranks; ++r)
    first.push_back(first.back() + unit * static_cast<int64_t>(random() % 40));
  if (first.back() == 0) first.back() = unit;
  return first;
}

TEST_P(DeviceRanks, GathersColumns) {
  TestGroup group(GetParam(), {0, 128, 8 << 10});
  std::mt19937_64 random(11);
  for (int round = 0; round < 40; ++round) {
    const std::vector<int64_t> first = random_parts(group.size(), round % 2 == 0 ? 16 : 4, random);
    const int64_t rows = 1 + static_cast<int64_t>(random() % 60), width = first.back();
    std::vector<uint8_t> whole(static_cast<size_t>(rows * width));
    for (uint8_t& byte : whole) byte = static_cast<uint8_t>(random());
    std::vector<Buffer> mine, out;
    group.for_each([&](int r, DeviceCommunicator& rank) {
      const int64_t begin = first[static_cast<size_t>(r)], cols = first[static_cast<size_t>(r) + 1] - begin;
      std::vector<uint8_t> part(static_cast<size_t>(std::max<int64_t>(rows * cols, 4)));
      for (int64_t row = 0; row < rows; ++row)
        std::copy_n(whole.begin() + row * width + begin, cols, part.begin() + row * cols);
      mine.push_back(on_device(part));
      out.push_back(on_device(std::vector<uint8_t>(whole.size(), 0xaa)));
      rank.gather_columns({"gather"}, mine.back().data(), rows, first, out.back().data());
    });
    group.expect_ok();
    group.for_each([&](int r, DeviceCommunicator&) {
      EXPECT_EQ(from_device<uint8_t>(out[static_cast<size_t>(r)]), whole)
          << "round " << round << ", rank " << r;
    });
  }
}

// Each rank gets other rows, perhaps overlapping those of another, in pieces that fit in the heap.
TEST_P(DeviceRanks, GathersColumnsOfOtherRowsForEachRank) {
  TestGroup group(GetParam(), {0, 128, 8 << 10});
  std::mt19937_64 random(13);
  for (int round = 0; round < 20; ++round) {
    const std::vector<int64_t> first = random_parts(group.size(), round % 2 == 0 ? 16 : 4, random);
    const int64_t all_rows = 1 + static_cast<int64_t>(random() % 60), width = first.back();
    const int64_t rows = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(all_rows));
    std::vector<int64_t> first_row;
    for (int r = 0; r < group.size(); ++r)
      first_row.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(all_rows - rows + 1)));
    std::vector<uint8_t> whole(static_cast<size_t>(all_rows * width));
    for (uint8_t& byte : whole) byte = static_cast<uint8_t>(random());
    std::vector<Buffer> mine, out;
    group.for_each([&](int r, DeviceCommunicator& rank) {
      const int64_t begin = first[static_cast<size_t>(r)], cols = first[static_cast<size_t>(r) + 1] - begin;
      std::vector<uint8_t> part(static_cast<size_t>(std::max<int64_t>(all_rows * cols, 4)));
      for (int64_t row = 0; row < all_rows; ++row)
        std::copy_n(whole.begin() + row * width + begin, cols, part.begin() + row * cols);
      mine.push_back(on_device(part));
      out.push_back(on_device(std::vector<uint8_t>(static_cast<size_t>(rows * width), 0xaa)));
      rank.gather_columns({"gather"}, mine.back().data(), rows, first, out.back().data(),
                          {.first_row = first_row});
    });
    group.expect_ok();
    group.for_each([&](int r, DeviceCommunicator&) {
      const auto at = static_cast<size_t>(r);
      const auto begin = whole.begin() + first_row[at] * width;
      EXPECT_EQ(from_device<uint8_t>(out[at]), std::vector<uint8_t>(begin, begin + rows * width))
          << "round " << round << ", rank " << r;
    });
  }
}

// Gathers rows in place, in pieces that fit in the heap; some ranks have no row.
TEST_P(DeviceRanks, GatheredRowsAreWhole) {
  TestGroup group(GetParam(), {0, 64 << 10, 4096});
  std::mt19937_64 random(7);
  for (const int64_t num_rows : {1, 3, 64, 301}) {
    const int64_t width = 48;
    std::vector<int64_t> first;
    for (int r = 0; r <= group.size(); ++r) first.push_back(num_rows * r / group.size());
    std::vector<uint8_t> whole(static_cast<size_t>(num_rows * width));
    for (uint8_t& byte : whole) byte = static_cast<uint8_t>(random());
    std::vector<Buffer> out;
    group.for_each([&](int r, DeviceCommunicator& rank) {
      const auto begin = first[static_cast<size_t>(r)] * width,
                 end = first[static_cast<size_t>(r) + 1] * width;
      std::vector<uint8_t> rows(whole.size(), 0xaa);
      std::copy(whole.begin() + begin, whole.begin() + end, rows.begin() + begin);
      out.push_back(on_device(rows));
      rank.gather_rows({"gather"}, out.back().as<uint8_t>() + begin, width, first, out.back().data());
    });
    group.expect_ok();
    group.for_each([&](int r, DeviceCommunicator&) {
      EXPECT_EQ(from_device<uint8_t>(out[static_cast<size_t>(r)]), whole) << num_rows << " rows, rank " << r;
    });
  }
}

// Enqueues many operations without a wait in between, so that ranks are up to two operations apart and both
// buffers are in use.
TEST_P(DeviceRanks, ManyOperationsInARow) {
  TestGroup group(GetParam(), {0, 32 << 10, 32 << 10});
  std::mt19937_64 random(3);
  std::vector<std::unique_ptr<Sum>> sums;
  for (int i = 0; i < 60; ++i) {
    sums.push_back(std::make_unique<Sum>(group, 4 * (1 + static_cast<int64_t>(random() % 20000)), random()));
    sums.back()->upload(group);
  }
  group.synchronize();
  for (const auto& sum : sums) sum->enqueue(group);
  group.expect_ok();
  for (const auto& sum : sums) sum->check(group, "a sum among many");
}

TEST_P(DeviceRanks, GraphsReplayOperations) {
  TestGroup group(GetParam());
  Sum small(group, 2880, 1), large(group, 40000, 2);
  small.upload(group), large.upload(group);
  std::vector<Graph> graphs;
  group.for_each([&](int r, DeviceCommunicator& rank) {
    const auto i = static_cast<size_t>(r);
    graphs.push_back(
        Graph::capture(group.ranks[i]->stream, [&]() -> Status {
          rank.add_all_reduced({"small", 0}, small.partial[i].as<float>(), small.out[i].as<float>(), 2880);
          rank.add_all_reduced({"large", 1}, large.partial[i].as<float>(), large.out[i].as<float>(), 40000);
          return {};
        }).value());
  });
  constexpr int kReplays = 25;
  group.replay(graphs, kReplays);
  group.expect_ok();
  for (Sum* sum : {&small, &large}) {
    std::vector<float> expected = sum->before;
    for (int i = 0; i < kReplays; ++i) expected = expected_sum(sum->partials, expected);
    sum->before = expected;
    for (auto& partial : sum->partials) std::fill(partial.begin(), partial.end(), -0.0f);
    sum->check(group, "replays");
  }
}

// One rank skips an operation: the other ranks name it within the deadline, and later operations do nothing.
TEST_P(DeviceRanks, AMissingRankFailsTheGroupInTime) {
  if (GetParam() == 1) GTEST_SKIP() << "one rank has no peer";
  TestGroup group(GetParam(), {0, 64 << 10, 64 << 10}, std::chrono::milliseconds(300));
  Sum sum(group, 2880, 9);
  sum.upload(group);
  group.synchronize();
  const int missing = group.size() - 1;
  const auto start = std::chrono::steady_clock::now();
  group.for_each([&](int r, DeviceCommunicator& rank) {
    const auto i = static_cast<size_t>(r);
    if (r != missing)
      rank.add_all_reduced({"mlp", 3}, sum.partial[i].as<float>(), sum.out[i].as<float>(), 2880);
    for (int more = 0; more < 20; ++more)
      rank.add_all_reduced({"later", 4}, sum.partial[i].as<float>(), sum.out[i].as<float>(), 2880);
  });
  group.synchronize();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  group.expect_deadline_naming("for rank " + std::to_string(missing));
  // The group has failed, so a new operation returns at once.
  const auto again = std::chrono::steady_clock::now();
  sum.enqueue(group);
  group.synchronize();
  EXPECT_LT(std::chrono::steady_clock::now() - again, std::chrono::milliseconds(200));
}

// As those of two models: the ranks enqueue the operations of both in one order on one stream each.
TEST_P(DeviceRanks, TwoCommunicatorsOfARegionTakeTurnsAndNameTheirOperations) {
  const DeviceRegion region{0, 64 << 10, 64 << 10};
  const auto timeout = std::chrono::seconds(2);
  TestGroup group(GetParam(), region, timeout);
  std::vector<std::unique_ptr<DeviceCommunicator>> drafts;
  std::vector<Sum> sums;
  for (uint64_t turn = 0; turn < 7; ++turn) sums.emplace_back(group, 2880, 100 * turn + 1);
  group.for_each([&](int r, DeviceCommunicator&) {
    drafts.push_back(DeviceCommunicator::make(*group.heap, 0, group.size(), r, region, timeout).value());
    drafts.back()->name_model("the draft model");
  });
  for (Sum& sum : sums) sum.upload(group);
  group.synchronize();
  const auto enqueue = [&](Sum& sum, bool is_draft, int missing) {
    group.for_each([&](int r, DeviceCommunicator& rank) {
      const auto i = static_cast<size_t>(r);
      const DeviceCommunicator& from = is_draft ? *drafts[i] : rank;
      if (r != missing)
        from.add_all_reduced({"mlp", 3}, sum.partial[i].as<float>(), sum.out[i].as<float>(), sum.n());
    });
  };
  for (size_t turn = 0; turn < sums.size(); ++turn) enqueue(sums[turn], turn % 3 != 0, -1);
  group.expect_ok();
  for (Sum& sum : sums) sum.check(group, "turns");
  if (group.size() == 1) return;
  enqueue(sums[0], /*is_draft=*/true, group.size() - 1);
  group.expect_ok();  // of the other communicators
  int num_named = 0;
  for (const auto& draft : drafts)
    num_named += draft->failure().message().find("in mlp of the draft model, layer 3") != std::string::npos;
  EXPECT_GE(num_named, 1);
}

TEST(PeerHeap, IsOneAddressForAllRanksAndStartsWithZeros) {
  const auto heap = PeerHeap::make(gpus_of(3), 1000).value();
  EXPECT_EQ(heap->num_ranks(), 3);
  EXPECT_GE(heap->num_bytes(), 1000);
  for (int r = 0; r < 3; ++r) {
    const DeviceScope scope(*DeviceContext::of(gpus_of(3).front()).value());
    std::vector<uint8_t> bytes(static_cast<size_t>(heap->num_bytes()), 1);
    ASSERT_TRUE(device_memory().download(bytes.data(), heap->base(r), heap->num_bytes()).ok());
    EXPECT_TRUE(std::all_of(bytes.begin(), bytes.end(), [](uint8_t b) { return b == 0; }));
  }
}

TEST(PeerHeap, NamesAGpuThatDoesNotExistAndOneThatIsTooSmall) {
  const auto missing = PeerHeap::make(std::vector<int>{0, 99}, 1000);
  EXPECT_EQ(missing.status().code(), StatusCode::kUnsupported);
  EXPECT_NE(missing.status().message().find("GPU 99"), std::string::npos);
  const auto large = PeerHeap::make(std::vector<int>{0}, int64_t{1} << 45);
  EXPECT_EQ(large.status().code(), StatusCode::kDoesNotFit);
  EXPECT_NE(large.status().message().find("heap of rank 0"), std::string::npos);
}

}  // namespace
}  // namespace fp4moe
