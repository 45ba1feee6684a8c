#include "model/kv_cache.h"

#include <gtest/gtest.h>

#include <set>

namespace fp4moe {
namespace {

ModelConfig three_layers() {
  ModelConfig config;
  config.num_layers = 3;
  config.num_kv_heads = 2;
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

TEST(KvCache, RefusesNoPagesAndOverflow) {
  EXPECT_EQ(KvCache::make(three_layers(), DType::kBF16, 0, 16).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(KvCache::make(three_layers(), DType::kBF16, INT64_MAX / 2, 16).status().code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace fp4moe
