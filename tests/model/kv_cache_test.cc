#include "model/kv_cache.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <tuple>
#include <vector>

namespace fp4moe {
namespace {

ModelConfig three_layers() {
  ModelConfig config;
  config.num_layers = 3;
  config.num_heads = config.num_kv_heads = 2;
  config.head_dim = 4;
  return config;
}

// Every (layer, k or v) has its own region of the right size, inside the buffer, without overlap.
TEST(KvCache, RegionsTileTheBuffer) {
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF8E4M3}) {
    const Result<KvCache> kv = KvCache::make(three_layers(), dtype, {5}, 16);
    ASSERT_TRUE(kv.ok());
    const int64_t region = 5 * 2 * 16 * 4 * dtype_bits(dtype) / 8;
    EXPECT_EQ(kv->num_bytes(), 6 * region);
    EXPECT_EQ(kv->num_bytes(), 5 * KvCache::bytes_per_page(three_layers(), dtype, 16).full);
    std::set<uint8_t*> starts;
    for (int64_t layer = 0; layer < 3; ++layer)
      for (const KvPages& pages : {kv->k_pages(layer), kv->v_pages(layer)}) {
        EXPECT_EQ(pages.dtype, dtype);
        EXPECT_EQ(pages.page_size, 16);
        starts.insert(static_cast<uint8_t*>(pages.data));
      }
    ASSERT_EQ(starts.size(), 6u);
    const uint8_t* first = *starts.begin();
    int64_t i = 0;
    for (const uint8_t* start : starts) EXPECT_EQ(start, first + region * i++);
  }
}

// Tensor parallel ranks store their own heads; with fewer KV heads than ranks each rank stores one.
TEST(KvCache, HoldsTheHeadsOfTheRank) {
  ModelConfig config = three_layers();
  config.num_heads = 8;
  config.num_kv_heads = 4;
  const int64_t whole = KvCache::bytes_per_page(config, DType::kBF16, 16).full;
  for (const auto& [tp, dp, parts] : {std::tuple{2, 1, 2}, {4, 1, 4}, {8, 1, 4}, {8, 8, 1}, {8, 4, 2}})
    for (int rank = 0; rank < tp; ++rank) {
      const RankLayout layout{.tp = tp, .ep = 1, .dp = dp, .rank = rank};
      EXPECT_EQ(KvCache::bytes_per_page(config, DType::kBF16, 16, layout).full, whole / parts)
          << tp << " " << dp;
    }
}

// Latents and rotary keys are one tensor, equal on every rank, whose first columns are the values.
TEST(KvCache, LatentPagesHoldKeysWhoseFirstColumnsAreTheValues) {
  ModelConfig config = three_layers();
  config.num_heads = 8;
  config.num_kv_heads = 8;
  config.mla = {.kv_lora_rank = 24, .qk_nope_head_dim = 12, .qk_rope_head_dim = 8, .v_head_dim = 10};
  const RankLayout layout{.tp = 4, .ep = 1, .dp = 1, .rank = 3};
  EXPECT_EQ(KvCache::bytes_per_page(config, DType::kBF16, 16, layout).full, 3 * 16 * (24 + 8) * 2);
  const Result<KvCache> kv = KvCache::make(config, DType::kBF16, {5}, 16, layout);
  ASSERT_TRUE(kv.ok());
  const int32_t pages[] = {4, 2};
  for (int64_t layer = 0; layer < 3; ++layer) {
    const KvPages k = kv->k_pages(layer), v = kv->v_pages(layer);
    EXPECT_EQ(k.data, v.data);
    EXPECT_EQ(k.num_kv_heads, 1);
    EXPECT_EQ(k.head_dim, 32);
    EXPECT_EQ(v.head_dim, 24);
    for (int64_t position : {0, 15, 16, 31})
      EXPECT_EQ(k.offset(pages, 0, position), v.offset(pages, 0, position));
    EXPECT_EQ(static_cast<uint8_t*>(k.data) - static_cast<uint8_t*>(kv->k_pages(0).data),
              layer * 5 * 16 * 32 * 2);
  }
}

ModelConfig with_windows(std::vector<int64_t> windows) {
  ModelConfig config = three_layers();
  config.num_layers = std::ssize(windows);
  config.layer_windows = std::move(windows);
  return config;
}

TEST(KvCache, TheWindowIsThatOfLayersBesideFullOnes) {
  EXPECT_EQ(KvCache::window(three_layers()), 0);
  EXPECT_EQ(KvCache::window(with_windows({0, 0})), 0);
  EXPECT_EQ(KvCache::window(with_windows({8, 8})), 0) << "no full layer records the prefixes";
  EXPECT_EQ(KvCache::window(with_windows({8, 0, 4})), 8);
  EXPECT_EQ(KvCache::bytes_per_page(with_windows({8, 8}), DType::kBF16, 16).window, 0);
}

class WindowPages : public testing::TestWithParam<DType> {};

// Full and window layers have their own pages, which tile the buffer; without window pages all layers have
// the pages of full layers.
TEST_P(WindowPages, WindowLayersHaveTheirOwnPages) {
  const ModelConfig config = with_windows({8, 0, 8, 0, 0});
  const KvCounts bytes = KvCache::bytes_per_page(config, GetParam(), 16);
  const int64_t tensor_page = 2 * 16 * 4 * dtype_bits(GetParam()) / 8;
  EXPECT_EQ(bytes.full, 3 * 2 * tensor_page);
  EXPECT_EQ(bytes.window, 2 * 2 * tensor_page);
  for (const int64_t num_window_pages : {0, 3}) {
    const auto kv = KvCache::make(config, GetParam(), {7, num_window_pages}, 16);
    ASSERT_TRUE(kv.ok());
    const bool splits = num_window_pages > 0;
    EXPECT_EQ(kv->num_bytes(), 7 * bytes.full + (splits ? num_window_pages : 7) * bytes.window);
    EXPECT_EQ(kv->num_pages(KvLayers::kWindow), num_window_pages);
    std::map<uint8_t*, int64_t> regions;  // start, bytes
    for (int64_t layer = 0; layer < 5; ++layer) {
      const bool in_window = splits && config.layer_windows[static_cast<size_t>(layer)] > 0;
      EXPECT_EQ(kv->layers_of(layer), in_window ? KvLayers::kWindow : KvLayers::kFull);
      for (const KvPages& pages : {kv->k_pages(layer), kv->v_pages(layer)})
        regions[static_cast<uint8_t*>(pages.data)] = (in_window ? num_window_pages : 7) * tensor_page;
    }
    EXPECT_EQ(regions.size(), 10u);
    uint8_t* end = regions.begin()->first;
    for (const auto& [start, num_bytes] : regions) {
      EXPECT_EQ(start, end);
      end = start + num_bytes;
    }
    EXPECT_EQ(end - regions.begin()->first, kv->num_bytes());
  }
  EXPECT_FALSE(KvCache::make(three_layers(), GetParam(), {7, 3}, 16).ok());
}

// The canonical page of each group has the rows of its layers only, and nothing else is written.
TEST_P(WindowPages, CanonicalPagesOfEachGroup) {
  const ModelConfig config = with_windows({8, 0, 0});
  const auto kv = KvCache::make(config, GetParam(), {3, 2}, 16);
  const int64_t layer_bytes = 2 * 2 * 4 * dtype_bits(GetParam()) / 8;
  EXPECT_EQ(kv->token_bytes(), 2 * layer_bytes);
  EXPECT_EQ(kv->token_bytes(KvLayers::kWindow), layer_bytes);
  std::vector<uint8_t> full(static_cast<size_t>(16 * kv->token_bytes())),
      window(static_cast<size_t>(16 * kv->token_bytes(KvLayers::kWindow)));
  for (size_t i = 0; i < full.size(); ++i) full[i] = static_cast<uint8_t>(1 + i % 100);
  for (size_t i = 0; i < window.size(); ++i) window[i] = static_cast<uint8_t>(101 + i % 100);
  for (int32_t page = 0; page < 3; ++page) kv->write_page(page, 16, full.data());
  for (int32_t page = 0; page < 2; ++page) kv->write_page({page, KvLayers::kWindow}, 16, window.data());
  std::vector<uint8_t> back(full.size());
  kv->read_page(2, 16, back.data());
  EXPECT_EQ(back, full);
  back.resize(window.size());
  kv->read_page({1, KvLayers::kWindow}, 16, back.data());
  EXPECT_EQ(back, window);
  EXPECT_EQ(*static_cast<uint8_t*>(kv->k_pages(0).data), 101);
  EXPECT_EQ(*static_cast<uint8_t*>(kv->k_pages(1).data), 1);
  const KvPageCopyArgs copy = kv->page_copy({1, KvLayers::kWindow}, 5, back.data());
  EXPECT_EQ(copy.pages, kv->k_pages(0).data);
  EXPECT_EQ(copy.num_tensors, 2);
  EXPECT_EQ(copy.num_pages, 2);
}

INSTANTIATE_TEST_SUITE_P(Types, WindowPages, testing::Values(DType::kBF16, DType::kF8E4M3),
                         [](const auto& p) { return std::string(dtype_name(p.param)); });

TEST(KvCache, RefusesNoPagesAndOverflow) {
  EXPECT_EQ(KvCache::make(three_layers(), DType::kBF16, {0}, 16).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(KvCache::make(three_layers(), DType::kBF16, {INT64_MAX / 2}, 16).status().code(),
            StatusCode::kInvalidArgument);
}

// Pages read by one rank can be written and read again by any number of ranks, byte for byte: heads divided
// over ranks, heads replicated on several ranks, latents. Nothing but the page's tokens changes.
TEST(KvCache, CanonicalPagesKnowNoRanks) {
  ModelConfig heads = three_layers(), few = three_layers(), latent = three_layers();
  heads.num_heads = 8;
  heads.num_kv_heads = 4;
  few.num_heads = 8;
  latent.num_heads = latent.num_kv_heads = 8;
  latent.mla = {.kv_lora_rank = 24, .qk_nope_head_dim = 12, .qk_rope_head_dim = 8, .v_head_dim = 10};
  for (const ModelConfig& config : {heads, few, latent})
    for (const auto& [num_tokens, dtype] : {std::pair{int64_t{1}, DType::kBF16},
                                            {7, DType::kBF16},
                                            {16, DType::kBF16},
                                            {7, DType::kF8E4M3},
                                            {16, DType::kF8E4M3}}) {
      const auto one = KvCache::make(config, dtype, {3}, 16);
      std::vector<uint8_t> page(static_cast<size_t>(num_tokens * one->token_bytes())), back(page.size());
      for (size_t i = 0; i < page.size(); ++i) page[i] = static_cast<uint8_t>(i * 7 + i / 251);
      one->write_page(1, num_tokens, page.data());
      for (const int tp : {1, 2, 4}) {
        std::fill(back.begin(), back.end(), uint8_t{0});
        for (int rank = 0; rank < tp; ++rank) {
          const auto kv = KvCache::make(config, dtype, {3}, 16, {.tp = tp, .ep = 1, .dp = 1, .rank = rank});
          ASSERT_EQ(kv->token_bytes(), one->token_bytes());
          std::vector<uint8_t> others(static_cast<size_t>(16 * kv->token_bytes()));
          kv->write_page(1, 16, others.data());
          kv->write_page(2, num_tokens, page.data());
          kv->read_page(2, num_tokens, back.data());
          kv->read_page(1, 16, others.data());
          EXPECT_EQ(others, std::vector<uint8_t>(others.size())) << "another page was written";
        }
        EXPECT_EQ(back, page) << "tp=" << tp << " tokens=" << num_tokens;
      }
    }
}

// The layout on the wire: layer, keys before values, token, head, column.
TEST(KvCache, CanonicalOrder) {
  const auto kv = KvCache::make(three_layers(), DType::kF32, {2}, 16);
  std::vector<float> page(static_cast<size_t>(5 * kv->token_bytes()) / sizeof(float));
  for (size_t i = 0; i < page.size(); ++i) page[i] = static_cast<float>(i);
  kv->write_page(1, 5, reinterpret_cast<const uint8_t*>(page.data()));
  for (int64_t layer = 0; layer < 3; ++layer)
    for (const int tensor : {0, 1}) {
      const KvPages pages = tensor == 0 ? kv->k_pages(layer) : kv->v_pages(layer);
      for (int64_t token = 0; token < 5; ++token)
        for (int64_t head = 0; head < 2; ++head)
          for (int64_t column = 0; column < 4; ++column)
            ASSERT_EQ(static_cast<const float*>(pages.data)[((2 + head) * 16 + token) * 4 + column],
                      static_cast<float>((((layer * 2 + tensor) * 5 + token) * 2 + head) * 4 + column));
    }
}

}  // namespace
}  // namespace fp4moe
