#include "model/kv_cache.h"

#include <gtest/gtest.h>

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

// Tensor parallel ranks store their own heads; with fewer KV heads than ranks each rank stores one.
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

// Latents and rotary keys are one tensor, equal on every rank, whose first columns are the values.
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
      const auto one = KvCache::make(config, dtype, 3, 16);
      std::vector<uint8_t> page(static_cast<size_t>(num_tokens * one->token_bytes())), back(page.size());
      for (size_t i = 0; i < page.size(); ++i) page[i] = static_cast<uint8_t>(i * 7 + i / 251);
      one->write_page(1, num_tokens, page.data());
      for (const int tp : {1, 2, 4}) {
        std::fill(back.begin(), back.end(), uint8_t{0});
        for (int rank = 0; rank < tp; ++rank) {
          const auto kv = KvCache::make(config, dtype, 3, 16, {.tp = tp, .ep = 1, .dp = 1, .rank = rank});
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
  const auto kv = KvCache::make(three_layers(), DType::kF32, 2, 16);
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
