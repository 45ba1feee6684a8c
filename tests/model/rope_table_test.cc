#include "model/rope_table.h"

#include <gtest/gtest.h>

#include <cmath>

namespace fp4moe {
namespace {

RopeConfig gpt_oss_yarn() {
  RopeConfig config;
  config.type = RopeConfig::Type::kYarn;
  config.theta = 150000;
  config.factor = 32;
  config.original_max_position_embeddings = 4096;
  config.truncate = false;
  return config;
}

TEST(Rope, PlainFrequenciesAreAGeometricRow) {
  RopeConfig config;
  config.theta = 10000;
  const RopeTable table = make_rope_table(config, 8);
  ASSERT_EQ(table.inv_freq.size(), 4u);
  EXPECT_EQ(table.attention_factor, 1.0f);
  for (int i = 0; i < 4; ++i)
    EXPECT_FLOAT_EQ(table.inv_freq[static_cast<size_t>(i)], std::pow(10.0f, static_cast<float>(-i)));
}

// Fast pairs keep their frequency, slow ones are divided by the factor, and the ramp in between is monotonic.
TEST(Rope, YarnInterpolatesSlowPairsOnly) {
  const RopeTable yarn = make_rope_table(gpt_oss_yarn(), 64);
  RopeConfig plain_config = gpt_oss_yarn();
  plain_config.type = RopeConfig::Type::kDefault;
  const RopeTable plain = make_rope_table(plain_config, 64);
  EXPECT_FLOAT_EQ(yarn.inv_freq.front(), plain.inv_freq.front());
  EXPECT_FLOAT_EQ(yarn.inv_freq.back(), plain.inv_freq.back() / 32);
  float last_ratio = 1;
  for (size_t i = 0; i < 32; ++i) {
    const float ratio = yarn.inv_freq[i] / plain.inv_freq[i];
    EXPECT_LE(ratio, last_ratio * (1 + 1e-6f));
    last_ratio = ratio;
  }
}

TEST(Rope, YarnConcentrationIsATenthOfLnFactorPlusOne) {
  EXPECT_FLOAT_EQ(make_rope_table(gpt_oss_yarn(), 64).attention_factor,
                  static_cast<float>(0.1 * std::log(32.0) + 1));
}

TEST(Rope, ExplicitAttentionFactorWins) {
  RopeConfig config = gpt_oss_yarn();
  config.attention_factor = 1.25;
  EXPECT_EQ(make_rope_table(config, 64).attention_factor, 1.25f);
}

TEST(Rope, EqualMscalesCancel) {  // as in DeepSeek's configurations
  RopeConfig config = gpt_oss_yarn();
  config.mscale = 1.0;
  config.mscale_all_dim = 1.0;
  EXPECT_EQ(make_rope_table(config, 64).attention_factor, 1.0f);
}

TEST(Rope, TruncationRoundsTheRampOutwards) {
  RopeConfig config = gpt_oss_yarn();
  const RopeTable exact = make_rope_table(config, 64);
  config.truncate = true;
  const RopeTable rounded = make_rope_table(config, 64);
  EXPECT_NE(exact.inv_freq, rounded.inv_freq);
  EXPECT_FLOAT_EQ(exact.inv_freq.front(), rounded.inv_freq.front());
  EXPECT_FLOAT_EQ(exact.inv_freq.back(), rounded.inv_freq.back());
}

}  // namespace
}  // namespace fp4moe
