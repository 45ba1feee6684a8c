#include "model/kv_cache.h"

#include <gtest/gtest.h>

#include <set>
#include <tuple>

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
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const Result<KvCache> kv = KvCache::make(three_layers(), dtype, 5, 16);
    ASSERT_TRUE(kv.ok());
    const int64_t region = 5 * 2 * 16 * 4 * dtype_bits(dtype) / 8;
    EXPECT_EQ(kv->num_bytes(), 6 * region);
    EXPECT_EQ(kv->num_bytes(), 5 * KvCache::bytes_per_page(three_layers(), dtype, 16));
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

// Tensor parallel ranks have their heads' pages; with fewer KV heads than ranks each rank has one.
TEST(KvCache, HoldsTheHeadsOfTheRank) {
  ModelConfig config = three_layers();
  config.num_heads = 8;
  config.num_kv_heads = 4;
  const int64_t whole = KvCache::bytes_per_page(config, DType::kBF16, 16);
  for (const auto& [tp, dp, parts] : {std::tuple{2, 1, 2}, {4, 1, 4}, {8, 1, 4}, {8, 8, 1}, {8, 4, 2}})
    for (int rank = 0; rank < tp; ++rank) {
      const RankLayout layout{.tp = tp, .ep = 1, .dp = dp, .rank = rank};
      EXPECT_EQ(KvCache::bytes_per_page(config, DType::kBF16, 16, layout), whole / parts) << tp << " " << dp;
    }
}

// Latents and rotary keys: one tensor, the same on every rank, whose first columns are the values.
TEST(KvCache, LatentPagesHoldKeysWhoseFirstColumnsAreTheValues) {
  ModelConfig config = three_layers();
  config.num_heads = 8;
  config.num_kv_heads = 8;
  config.mla = {.kv_lora_rank = 24, .qk_nope_head_dim = 12, .qk_rope_head_dim = 8, .v_head_dim = 10};
  const RankLayout layout{.tp = 4, .ep = 1, .dp = 1, .rank = 3};
  EXPECT_EQ(KvCache::bytes_per_page(config, DType::kBF16, 16, layout), 3 * 16 * (24 + 8) * 2);
  const Result<KvCache> kv = KvCache::make(config, DType::kBF16, 5, 16, layout);
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

TEST(KvCache, RefusesNoPagesAndOverflow) {
  EXPECT_EQ(KvCache::make(three_layers(), DType::kBF16, 0, 16).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(KvCache::make(three_layers(), DType::kBF16, INT64_MAX / 2, 16).status().code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace fp4moe
