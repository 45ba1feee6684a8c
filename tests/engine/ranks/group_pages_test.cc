// Pages and states of a group whose ranks share its heads: gathered and scattered through a staging buffer by
// ranks on the host, whose copies run when they are waited for, row by row as copy_kv_pages() runs them.
#include "engine/ranks/group_pages.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "base/check.h"
#include "io/status_matchers.h"
#include "model/kv_cache.h"

namespace fp4moe {
namespace {

constexpr int kPageSize = 8;
constexpr int32_t kNumPages = 4;

// One rank's pages, and those of a draft model behind them.
struct HostRank final : PageCopier {
  HostRank(const ModelConfig& config, DType dtype, KvCounts counts, const RankLayout& layout,
           const ModelConfig* draft_config)
      : kv(KvCache::make(config, dtype, counts, kPageSize, layout).value()) {
    if (draft_config != nullptr)
      draft = KvCache::make(*draft_config, dtype, {kNumPages}, kPageSize, layout).value();
  }

  Status start_pages(std::span<const StagedPage> pages, uint8_t* staging, CopyDirection direction) override {
    FP4MOE_RETURN_IF_ERROR(start_failure);
    if (throws) throw std::bad_alloc();
    for (const auto& [page, num_tokens, offset] : pages) {
      start(kv, page, num_tokens, staging + offset, direction);
      if (draft && page.layers == KvLayers::kFull)
        start(*draft, page, num_tokens, staging + offset + num_tokens * kv.token_bytes(), direction);
    }
    ++num_starts;
    return {};
  }
  Status start_state(int32_t slot, int64_t first, std::span<uint8_t> staging,
                     CopyDirection direction) override {
    FP4MOE_RETURN_IF_ERROR(start_failure);
    copies.push_back([=, this] {
      for (const StateCache::Piece& piece : kv.state_cache().pieces(slot, first, std::ssize(staging)))
        copy(piece.data, staging.data() + piece.offset, piece.num_bytes, direction);
    });
    return {};
  }
  Status finish_copies(const char* what) override {
    for (const auto& run : copies) run();
    copies.clear();
    return finish_failure.with_context(what);
  }

  void start(const KvCache& of, PageId page, int64_t num_tokens, uint8_t* canonical,
             CopyDirection direction) {
    if (direction == CopyDirection::kFromRank && !of.sends_pages()) return;
    copies.push_back([=, this, args = of.page_copy(page, num_tokens, canonical)] {
      for (int64_t i = 0; i < args.num_rows(); ++i) {
        const KvPageCopyArgs::Row row = args.row(i);
        copy(args.pages + args.index_in_pages(row) * args.row_bytes,
             args.canonical + args.index_in_canonical(row) * args.row_bytes, args.row_bytes, direction);
      }
    });
  }
  void copy(uint8_t* own, uint8_t* staged, int64_t num_bytes, CopyDirection direction) {
    const bool sends = direction == CopyDirection::kFromRank;
    std::copy_n(sends ? own : staged, num_bytes, sends ? staged : own);
    if (sends) bytes_sent += num_bytes;
  }

  KvCache kv;
  std::optional<KvCache> draft;
  std::vector<std::function<void()>> copies;
  int64_t bytes_sent = 0;
  int num_starts = 0;
  Status start_failure, finish_failure;
  bool throws = false;
};

struct HostGroup {
  HostGroup(int tp, const ModelConfig& config, DType dtype, KvCounts counts, int64_t staging_bytes,
            const ModelConfig* draft = nullptr) {
    // The second of two groups.
    std::vector<PageCopier*> copiers;
    for (int r = 0; r < tp; ++r) {
      const RankLayout layout{.tp = 2 * tp, .ep = 1, .dp = 2, .rank = tp + r};
      ranks.push_back(std::make_unique<HostRank>(config, dtype, counts, layout, draft));
      copiers.push_back(ranks.back().get());
    }
    pages = std::make_unique<GroupPages>(std::move(copiers), tp, Buffer::make(staging_bytes).value());
  }
  Status read_page(PageId page, int64_t num_tokens, std::span<uint8_t> canonical) {
    const PageRead one[] = {{page, num_tokens, canonical}};
    return pages->read_pages(one);
  }
  Status write_page(PageId page, int64_t num_tokens, std::span<const uint8_t> canonical) {
    const PageWrite one[] = {{page, num_tokens, canonical}};
    return pages->write_pages(one);
  }
  int64_t bytes_sent() const {
    int64_t sum = 0;
    for (const auto& rank : ranks) sum += rank->bytes_sent;
    return sum;
  }
  std::vector<std::unique_ptr<HostRank>> ranks;
  std::unique_ptr<GroupPages> pages;
};

std::vector<uint8_t> draw(int64_t num_bytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(static_cast<size_t>(num_bytes));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

ModelConfig model(int64_t kv_heads, int64_t head_dim, bool has_windows) {
  ModelConfig config;
  config.num_layers = 3;
  config.num_heads = 24;
  config.num_kv_heads = kv_heads;
  config.head_dim = head_dim;
  if (has_windows) config.layer_windows = {8, 0, 8};
  return config;
}

// A group gives back a page as it was written, and each of its bytes is sent by one rank; every rank's own
// heads are those of the page, and no other page changes.
void check_pages(int tp, const ModelConfig& config, DType dtype, const ModelConfig* draft = nullptr) {
  const bool has_windows = KvCache::window(config) > 0;
  const KvCounts counts{kNumPages, has_windows ? kNumPages : 0};
  const KvCache one = KvCache::make(config, dtype, counts, kPageSize).value();
  const KvCache one_draft = KvCache::make(draft ? *draft : config, dtype, {1}, kPageSize).value();
  const int64_t full_bytes = one.token_bytes() + (draft ? one_draft.token_bytes() : 0);
  HostGroup group(tp, config, dtype, counts,
                  kPageSize * std::max(full_bytes, one.token_bytes(KvLayers::kWindow)), draft);
  for (const KvLayers layers : {KvLayers::kFull, KvLayers::kWindow}) {
    if (layers == KvLayers::kWindow && !has_windows) continue;
    const int64_t token_bytes = layers == KvLayers::kFull ? full_bytes : one.token_bytes(layers);
    const std::vector<uint8_t> other = draw(kPageSize * token_bytes, 1);
    ASSERT_TRUE(is_ok(group.write_page({1, layers}, kPageSize, other)));
    for (const int64_t num_tokens : {0, 1, 5, kPageSize}) {
      const std::vector<uint8_t> page = draw(num_tokens * token_bytes, 2);
      std::vector<uint8_t> back(page.size()), still(other.size());
      ASSERT_TRUE(is_ok(group.write_page({2, layers}, num_tokens, page)));
      const int64_t before = group.bytes_sent();
      ASSERT_TRUE(is_ok(group.read_page({2, layers}, num_tokens, back)));
      ASSERT_EQ(back, page) << num_tokens;
      ASSERT_EQ(group.bytes_sent() - before, std::ssize(page)) << "a row was sent twice";
      for (const auto& rank : group.ranks) {
        std::vector<uint8_t> with_own = page;
        rank->kv.read_page({2, layers}, num_tokens, with_own.data());
        if (rank->draft && layers == KvLayers::kFull)
          rank->draft->read_page(2, num_tokens, with_own.data() + num_tokens * one.token_bytes());
        ASSERT_EQ(with_own, page) << "a rank has other heads";
      }
      ASSERT_TRUE(is_ok(group.read_page({1, layers}, kPageSize, still)));
      ASSERT_EQ(still, other) << "another page was written";
    }
  }
}

TEST(GroupPages, EveryLayoutOfHeadsGivesThePage) {
  int num_layouts = 0;
  for (const int tp : {1, 2, 3, 4, 6, 8})
    for (const int64_t kv_heads : {1, 2, 3, 4, 6, 8, 12, 24}) {
      if (kv_heads % tp != 0 && tp % kv_heads != 0) continue;
      ++num_layouts;
      for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF8E4M3})
        for (const int64_t head_dim : {16, 80})
          for (const bool has_windows : {false, true}) {
            SCOPED_TRACE("tp " + std::to_string(tp) + ", " + std::to_string(kv_heads) + " heads of " +
                         std::to_string(head_dim) + " " + dtype_name(dtype));
            check_pages(tp, model(kv_heads, head_dim, has_windows), dtype);
            if (HasFatalFailure()) return;
          }
    }
  EXPECT_EQ(num_layouts, 37);
}

TEST(GroupPages, LatentsAreSentByTheFirstRank) {
  ModelConfig config = model(24, 16, false);
  config.mla = {.kv_lora_rank = 32, .qk_nope_head_dim = 12, .qk_rope_head_dim = 16, .v_head_dim = 10};
  for (const int tp : {1, 2, 4, 8})
    for (const DType dtype : {DType::kBF16, DType::kF8E4M3}) check_pages(tp, config, dtype);
}

// The draft model has other heads than the target: on some ranks both are replicated, or only one of them.
TEST(GroupPages, TheDraftModelsPageIsBehindTheTargets) {
  for (const int tp : {1, 2, 4, 8})
    for (const int64_t draft_heads : {1, 2, 8})
      for (const bool has_windows : {false, true}) {
        ModelConfig draft = model(draft_heads, 32, false);
        draft.num_layers = 1;
        check_pages(tp, model(4, 16, has_windows), DType::kBF16, &draft);
      }
}

// States in pieces of any size, also larger than the staging buffer.
TEST(GroupPages, StatesAreGatheredPieceByPiece) {
  ModelConfig config = model(4, 16, false);
  config.layer_has_state = {true, false, true};
  config.delta = {
      .num_key_heads = 4, .num_value_heads = 8, .key_head_dim = 6, .value_head_dim = 5, .conv_width = 4};
  const int64_t state_bytes = StateCache::bytes_per_slot(config);
  for (const int tp : {1, 2, 4})
    for (const int64_t staging_bytes : {int64_t{129}, state_bytes}) {
      HostGroup group(tp, config, DType::kBF16, {kNumPages, 0, 4}, staging_bytes);
      const std::vector<uint8_t> other = draw(state_bytes, 1), state = draw(state_bytes, 2);
      ASSERT_TRUE(is_ok(group.pages->write_state(1, 0, other)));
      for (const int64_t piece : {state_bytes, int64_t{1000}, int64_t{97}}) {
        std::vector<uint8_t> back(state.size());
        for (int64_t first = 0; first < state_bytes; first += piece) {
          const auto at = static_cast<size_t>(first);
          const size_t count = std::min(static_cast<size_t>(piece), state.size() - at);
          ASSERT_TRUE(is_ok(group.pages->write_state(2, first, std::span(state).subspan(at, count))));
          ASSERT_TRUE(is_ok(group.pages->read_state(2, first, std::span(back).subspan(at, count))));
        }
        ASSERT_EQ(back, state) << "tp " << tp << ", pieces of " << piece;
        ASSERT_TRUE(is_ok(group.pages->read_state(1, 0, back)));
        ASSERT_EQ(back, other);
      }
      for (const auto& rank : group.ranks) {
        std::vector<uint8_t> with_own = state;
        rank->kv.state_cache().read_slot(2, 0, with_own);
        EXPECT_EQ(with_own, state);
      }
    }
}

// After an error no rank still uses the staging buffer, the caller's bytes are as before, and the next copy
// works.
TEST(GroupPages, AnErrorNamesTheRankAndEndsAllCopies) {
  const ModelConfig config = model(4, 16, false);
  HostGroup group(4, config, DType::kBF16, {kNumPages},
                  kPageSize * KvCache::make(config, DType::kBF16, {1}, kPageSize)->token_bytes());
  const std::vector<uint8_t> page = draw(kPageSize * group.ranks[0]->kv.token_bytes(), 3);
  ASSERT_TRUE(is_ok(group.write_page(3, kPageSize, page)));
  const auto check = [&](Status HostRank::*failure, const std::string& expected) {
    std::vector<uint8_t> bytes(page.size(), 7);
    (*group.ranks[1]).*failure = internal_error("no GPU");
    EXPECT_EQ(group.read_page(3, kPageSize, bytes).message(), expected);
    EXPECT_EQ(bytes, std::vector<uint8_t>(page.size(), 7));
    (*group.ranks[3]).*failure = internal_error("no GPU either");
    EXPECT_EQ(group.write_page(2, kPageSize, page).message().substr(0, 6), "rank 5");
    for (const auto& rank : group.ranks) {
      EXPECT_TRUE(rank->copies.empty());
      (*rank).*failure = {};
    }
    ASSERT_TRUE(is_ok(group.read_page(3, kPageSize, bytes)));
    EXPECT_EQ(bytes, page);
  };
  check(&HostRank::start_failure, "rank 5: no GPU");
  check(&HostRank::finish_failure, "rank 5: reading a KV page: no GPU");
  group.ranks[1]->throws = true;
  EXPECT_THROW(static_cast<void>(group.write_page(2, kPageSize, page)), std::bad_alloc);
  for (const auto& rank : group.ranks) EXPECT_TRUE(rank->copies.empty());
}

// Pages of both groups of layers, in any order and number, with as few starts as the staging buffer allows.
TEST(GroupPages, ManyPagesAreCopiedTogether) {
  const ModelConfig config = model(4, 16, true);
  const KvCounts counts{kNumPages, kNumPages};
  const KvCache one = KvCache::make(config, DType::kBF16, counts, kPageSize).value();
  const int64_t full = one.token_bytes(), window = one.token_bytes(KvLayers::kWindow);
  for (const int64_t pages_at_a_time : {1, 2, 5, 8}) {
    HostGroup group(2, config, DType::kBF16, counts, pages_at_a_time * kPageSize * std::max(full, window));
    std::vector<std::vector<uint8_t>> bytes, back;
    std::vector<PageWrite> writes;
    std::vector<PageRead> reads;
    for (const int32_t number : {2, 0, 3, 1})
      for (const KvLayers layers : {KvLayers::kFull, KvLayers::kWindow}) {
        const int64_t num_tokens = number == 3 ? 5 : kPageSize;
        bytes.push_back(draw(num_tokens * (layers == KvLayers::kFull ? full : window),
                             static_cast<uint32_t>(bytes.size())));
        back.emplace_back(bytes.back().size());
        writes.push_back({{number, layers}, num_tokens, bytes.back()});
        reads.push_back({{number, layers}, num_tokens, back.back()});
      }
    ASSERT_TRUE(is_ok(group.pages->write_pages(writes)));
    const int num_starts = group.ranks[0]->num_starts;
    ASSERT_TRUE(is_ok(group.pages->read_pages(reads)));
    EXPECT_EQ(back, bytes);
    EXPECT_EQ(group.ranks[0]->num_starts, 2 * num_starts);
    EXPECT_LE(num_starts, (std::ssize(writes) + pages_at_a_time - 1) / pages_at_a_time);
    ASSERT_TRUE(is_ok(group.pages->read_pages({})));
  }
}

// Each thread has a page, which it writes and reads while the other threads do the same.
TEST(GroupPages, ThreadsTakeTurns) {
  const ModelConfig config = model(4, 16, false);
  HostGroup group(2, config, DType::kBF16, {kNumPages},
                  kPageSize * KvCache::make(config, DType::kBF16, {1}, kPageSize)->token_bytes());
  std::vector<std::thread> threads;
  for (int32_t number = 0; number < kNumPages; ++number)
    threads.emplace_back([&, number] {
      for (uint32_t round = 0; round < 50; ++round) {
        const std::vector<uint8_t> page = draw(kPageSize * group.ranks[0]->kv.token_bytes(),
                                               round * kNumPages + static_cast<uint32_t>(number));
        std::vector<uint8_t> back(page.size());
        EXPECT_TRUE(is_ok(group.write_page(number, kPageSize, page)));
        EXPECT_TRUE(is_ok(group.read_page(number, kPageSize, back)));
        EXPECT_EQ(back, page);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace fp4moe
