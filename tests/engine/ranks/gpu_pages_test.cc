// KV pages and states of ranks on GPUs, which share one GPU or have one each, in the canonical form of their
// group: read, written, and handed over between layouts, also while steps run.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "device/device.h"
#include "device/device_info.h"
#include "device/device_memory.h"
#include "device/pinned_memory.h"
#include "device/stream.h"
#include "engine/ranks/growing.h"
#include "engine/ranks/set_layout.h"
#include "io/status_matchers.h"
#include "model/kv_cache.h"

namespace fp4moe {
namespace {

// Set before the first use of a GPU, which reads the variable; a value from outside stays.
const bool environment_is_set = [] {
  setenv("FP4MOE_RANKS_PER_GPU", "4", 0);
  return true;
}();

constexpr const char* kGptOss = "demo-gptoss-mxfp4";
constexpr const char* kDeepSeek = "demo-dsv3-nvfp4";
constexpr const char* kDeltas = "demo-qwen35-nvfp4";  // with states

std::vector<uint8_t> draw(int64_t num_bytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(static_cast<size_t>(num_bytes));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

// ---- the kernel -----------------------------------------------------------------------------------

// The heads of all ranks of a group are on one GPU here: each rank's kernel copies its range of the same
// pinned page, as the host copies it.
void check_kernel(const ModelConfig& config, DType dtype, int tp) {
  constexpr int64_t kNumPages = 3, kPageSize = 16;
  Stream stream = std::move(Stream::make()).value();
  const StreamScope scope(stream);
  const KvCache one = KvCache::make(config, dtype, {kNumPages}, kPageSize).value();
  const Buffer pinned = Buffer::make(kPageSize * one.token_bytes(), pinned_memory()).value();
  std::vector<KvCache> on_gpu, on_host;
  for (int r = 0; r < tp; ++r) {
    const RankLayout layout{.tp = tp, .ep = 1, .dp = 1, .rank = r};
    on_gpu.push_back(KvCache::make(config, dtype, {kNumPages}, kPageSize, layout, device_memory()).value());
    on_host.push_back(KvCache::make(config, dtype, {kNumPages}, kPageSize, layout).value());
  }
  const auto copy_page = [&](const KvCache& kv, int32_t page, int64_t num_tokens, bool to_device) {
    KvPagesCopyArgs args{.each = kv.page_copy(page, num_tokens, pinned.data()), .num_pages = 1};
    args.pages[0] = {page, static_cast<int32_t>(num_tokens), 0};
    args.each.to_device = to_device;
    cuda_copy_kv_pages()(args);
  };
  for (int32_t page = 0; page < kNumPages; ++page) {  // no byte is uninitialised
    const std::vector<uint8_t> all = draw(kPageSize * one.token_bytes(), static_cast<uint32_t>(page));
    std::copy(all.begin(), all.end(), pinned.data());
    for (const KvCache& kv : on_gpu) copy_page(kv, page, kPageSize, true);
    for (const KvCache& kv : on_host) kv.write_page(page, kPageSize, all.data());
    ASSERT_TRUE(is_ok(stream.synchronize()));
  }
  for (const int64_t num_tokens : {1, 7, 16}) {
    const std::vector<uint8_t> few = draw(num_tokens * one.token_bytes(), 9);
    std::copy(few.begin(), few.end(), pinned.data());
    for (const KvCache& kv : on_gpu) copy_page(kv, 1, num_tokens, true);
    for (const KvCache& kv : on_host) kv.write_page(1, num_tokens, few.data());
    ASSERT_TRUE(is_ok(stream.synchronize()));
    for (int32_t page = 0; page < kNumPages; ++page) {
      std::vector<uint8_t> expected(static_cast<size_t>(kPageSize * one.token_bytes()), 0xEE),
          actual = expected;
      std::copy(actual.begin(), actual.end(), pinned.data());
      for (size_t r = 0; r < on_gpu.size(); ++r) {
        if (!on_gpu[r].sends_pages()) continue;
        copy_page(on_gpu[r], page, kPageSize, false);
        on_host[r].read_page(page, kPageSize, expected.data());
      }
      ASSERT_TRUE(is_ok(stream.synchronize()));
      std::copy_n(pinned.data(), actual.size(), actual.begin());
      ASSERT_EQ(actual, expected) << "page " << page << " after " << num_tokens << " tokens";
    }
  }
}

TEST(CopyKvPage, EachRankCopiesItsHeadsOfOnePage) {
  ModelConfig config;
  config.num_layers = 3;
  config.num_heads = 24;
  for (const int tp : {1, 2, 3, 4, 8})
    for (const int64_t kv_heads : {1, 2, 4, 8, 24})
      for (const int64_t head_dim : {16, 64, 80})
        for (const DType dtype : {DType::kBF16, DType::kF8E4M3}) {
          if (kv_heads % tp != 0 && tp % kv_heads != 0) continue;
          SCOPED_TRACE("tp " + std::to_string(tp) + ", " + std::to_string(kv_heads) + " heads of " +
                       std::to_string(head_dim) + " " + dtype_name(dtype));
          config.num_kv_heads = kv_heads;
          config.head_dim = head_dim;
          check_kernel(config, dtype, tp);
        }
  config.mla = {.kv_lora_rank = 64, .qk_nope_head_dim = 16, .qk_rope_head_dim = 16, .v_head_dim = 16};
  for (const int tp : {1, 4}) check_kernel(config, DType::kBF16, tp);
}

// ---- groups ---------------------------------------------------------------------------------------

struct Layout {
  int tp = 1, ep = 1, dp = 1;
  const char* a2a = "none";
  const char* kv_dtype = "auto";
  std::string text() const {
    return "tp " + std::to_string(tp) + " ep " + std::to_string(ep) + " dp " + std::to_string(dp) + " " +
           a2a + " " + kv_dtype;
  }
};

EngineConfig flags_of(const Layout& layout) {
  EngineConfig flags;
  set_layout(flags, layout);
  flags.kv_cache_dtype = layout.kv_dtype;
  flags.enable_deterministic_inference = true;
  flags.comm_timeout = 20;
  return flags;
}

bool has_gpus(const Layout& layout) { return device_info(gpu_of_rank(layout.tp - 1)).ok(); }

constexpr Layout kLayouts[] = {
    {2, 1}, {2, 2}, {4, 1}, {2, 1, 2}, {4, 4, 2}, {2, 2, 2, "deepep"}, {4, 4, 4, "deepep"},
};

class GpuPages : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Demos, GpuPages, testing::Values(kGptOss, kDeepSeek, kDeltas), [](const auto& p) {
  std::string name = p.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

// All pages of a group are written, last first, and read back together.
void check_batches(RankGroup& ranks, int group) {
  const int64_t size = ranks.page_size();
  std::vector<std::vector<uint8_t>> bytes, back;
  std::vector<PageWrite> writes;
  std::vector<PageRead> reads;
  for (auto page = static_cast<int32_t>(ranks.num_kv_pages()) - 1; page >= 0; --page) {
    const int64_t num_tokens = page % 3 == 0 ? size - 1 : size;
    bytes.push_back(draw(num_tokens * ranks.kv_token_bytes(), static_cast<uint32_t>(5000 + page)));
    back.emplace_back(bytes.back().size());
    writes.push_back({page, num_tokens, bytes.back()});
    reads.push_back({page, num_tokens, back.back()});
  }
  ASSERT_TRUE(is_ok(ranks.write_pages(group, writes)));
  ASSERT_TRUE(is_ok(ranks.read_pages(group, reads)));
  EXPECT_EQ(back, bytes) << "group " << group;
}

// Every page and state of every group is read back as written, and no other one changes.
TEST_P(GpuPages, AreReadBackAsWritten) {
  for (const Layout& layout : kLayouts) {
    if (!has_gpus(layout)) continue;
    SCOPED_TRACE(layout.text());
    Growing growing(GetParam(), flags_of(layout));
    RankGroup& ranks = growing.ranks();
    const int64_t size = ranks.page_size(), token_bytes = ranks.kv_token_bytes();
    const auto page_seed = [&](int group, int32_t page) {
      return static_cast<uint32_t>(group * 1000 + page);
    };
    const auto for_all = [&](const auto& on_page, const auto& on_slot) {
      for (int group = 0; group < ranks.num_groups(); ++group) {
        for (int32_t page = 0; page < ranks.num_kv_pages(); ++page)
          on_page(group, page, draw(size * token_bytes, page_seed(group, page)));
        for (int32_t slot = 1; slot < ranks.num_slots(); ++slot)
          on_slot(group, slot, draw(ranks.state_bytes(), 7 + page_seed(group, slot)));
      }
    };
    for_all(
        [&](int group, int32_t page, const std::vector<uint8_t>& bytes) {
          ASSERT_TRUE(is_ok(ranks.write_page(group, page, size, bytes.data())));
        },
        [&](int group, int32_t slot, const std::vector<uint8_t>& bytes) {
          ASSERT_TRUE(is_ok(ranks.write_state(group, slot, 0, bytes)));
        });
    for_all(
        [&](int group, int32_t page, const std::vector<uint8_t>& bytes) {
          std::vector<uint8_t> back(bytes.size());
          ASSERT_TRUE(is_ok(ranks.read_page(group, page, size, back.data())));
          ASSERT_EQ(back, bytes) << "group " << group << ", page " << page;
        },
        [&](int group, int32_t slot, const std::vector<uint8_t>& bytes) {
          std::vector<uint8_t> back(bytes.size());
          ASSERT_TRUE(is_ok(ranks.read_state(group, slot, 0, back)));
          ASSERT_EQ(back, bytes) << "group " << group << ", slot " << slot;
        });
    for (int group = 0; group < ranks.num_groups(); ++group) check_batches(ranks, group);
  }
}

// Every layout has the pages and states of one rank, bit for bit, and continues from them, whichever layout
// computed them.
TEST_P(GpuPages, AreHandedOverBetweenLayouts) {
  for (const char* kv_dtype : {"auto", "fp8_e4m3"}) {
    Growing one(GetParam(), flags_of({.kv_dtype = kv_dtype}));
    std::vector<Logits> expected = {one.step(kPrompts)};
    const auto pages = one.pages(), states = one.states();
    for (int i = 0; i < 6; ++i) expected.push_back(one.step(best_of(expected.back())));
    for (const auto& [from, to] : {std::pair<Layout, Layout>{{}, {2, 1}},
                                   {{2, 1}, {}},
                                   {{2, 1}, {2, 1, 2}},
                                   {{2, 1, 2}, {2, 1}},
                                   {{4, 1}, {2, 2, 2, "deepep"}},
                                   {{4, 4, 2}, {4, 1}}}) {
      if (!has_gpus(from) || !has_gpus(to)) continue;
      SCOPED_TRACE(from.text() + " to " + to.text() + ", KV " + kv_dtype);
      Layout prefill_layout = from, decode_layout = to;
      prefill_layout.kv_dtype = decode_layout.kv_dtype = kv_dtype;
      Growing prefill(GetParam(), flags_of(prefill_layout)), decode(GetParam(), flags_of(decode_layout));
      ASSERT_EQ(prefill.step(kPrompts), expected[0]);
      ASSERT_EQ(prefill.pages(), pages);
      ASSERT_EQ(prefill.states(), states);
      decode.take_over(prefill);
      ASSERT_EQ(decode.pages(), pages);
      ASSERT_EQ(decode.states(), states);
      for (size_t i = 1; i < expected.size(); ++i)
        ASSERT_EQ(decode.step(best_of(expected[i - 1])), expected[i]) << "step " << i;
    }
  }
}

// A CPU's ranks have the same layout of pages: what GPU ranks got from them is what they give back.
TEST_P(GpuPages, OfACpuArePassedOn) {
  EngineConfig cpu_flags;
  cpu_flags.device = "cpu";
  cpu_flags.tp_size = 2;
  Growing cpu(GetParam(), cpu_flags);
  cpu.step(kPrompts);
  const auto pages = cpu.pages(), states = cpu.states();
  for (const Layout& layout : {Layout{2, 1}, {2, 1, 2}, {4, 4, 2}}) {
    if (!has_gpus(layout)) continue;
    SCOPED_TRACE(layout.text());
    Growing gpu(GetParam(), flags_of(layout)), back(GetParam(), cpu_flags);
    gpu.take_over(cpu);
    EXPECT_EQ(gpu.pages(), pages);
    EXPECT_EQ(gpu.states(), states);
    back.take_over(gpu);
    EXPECT_EQ(back.pages(), pages);
    EXPECT_EQ(back.states(), states);
  }
}

// Threads read and write pages that no step uses while steps run: no output changes, nothing waits forever.
TEST_P(GpuPages, AreCopiedWhileStepsRun) {
  for (const Layout& layout : {Layout{}, {2, 1}, {2, 1, 2}, {4, 4, 4, "deepep"}}) {
    if (!has_gpus(layout)) continue;
    SCOPED_TRACE(layout.text());
    Growing quiet(GetParam(), flags_of(layout)), busy(GetParam(), flags_of(layout));
    RankGroup& ranks = busy.ranks();
    std::atomic<bool> ends = false;
    std::atomic<int64_t> num_copies = 0;
    std::vector<std::thread> threads;
    for (int32_t number = 0; number < 4; ++number)
      threads.emplace_back([&, number] {
        const int group = number % ranks.num_groups();
        const auto page = static_cast<int32_t>(ranks.num_kv_pages()) - 1 - number;  // of no sequence
        for (uint32_t round = 0; !ends; ++round) {
          const std::vector<uint8_t> bytes =
              draw(ranks.page_size() * ranks.kv_token_bytes(), round * 4 + static_cast<uint32_t>(number));
          std::vector<uint8_t> back(bytes.size());
          EXPECT_TRUE(is_ok(ranks.write_page(group, page, ranks.page_size(), bytes.data())));
          EXPECT_TRUE(is_ok(ranks.read_page(group, page, ranks.page_size(), back.data())));
          EXPECT_EQ(back, bytes);
          ++num_copies;
        }
      });
    Logits expected = quiet.step(kPrompts);
    EXPECT_EQ(busy.step(kPrompts), expected);
    for (int i = 0; i < 40; ++i) {
      const auto next = best_of(expected);
      expected = quiet.step(next);
      const Logits actual = busy.step(next);
      EXPECT_EQ(actual, expected) << "step " << i;
      if (actual != expected) break;
    }
    ends = true;
    for (std::thread& thread : threads) thread.join();
    EXPECT_GT(num_copies, 8);
  }
}

}  // namespace
}  // namespace fp4moe
