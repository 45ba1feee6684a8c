#include "model/lm_head.h"

#include <gtest/gtest.h>

namespace fp4moe {
namespace {

// Shards contain every row once and in order, in panels of 16 except the last, as evenly as possible.
TEST(LmHead, ShardsCoverTheVocabulary) {
  for (int64_t vocab = 1; vocab <= 200; ++vocab)
    for (int64_t parts = 1; parts <= 9; ++parts) {
      int64_t next = 0, most = 0, least = vocab;
      for (int64_t i = 0; i < parts; ++i) {
        const Shard shard = vocab_shard(vocab, parts, i);
        EXPECT_EQ(shard.first, next);
        EXPECT_GE(shard.count, 0);
        EXPECT_TRUE(shard.first % 16 == 0 || shard.count == 0);
        next += shard.count;
        most = std::max(most, shard.count);
        least = std::min(least, shard.count);
      }
      EXPECT_EQ(next, vocab) << parts;
      EXPECT_LE(most - least, 31) << vocab << " " << parts;
    }
}

}  // namespace
}  // namespace fp4moe
