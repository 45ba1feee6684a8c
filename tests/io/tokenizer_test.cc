#include "io/tokenizer.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "status_matchers.h"

namespace fp4moe {
namespace {

TEST(TokenizerDemo, KnowsItsSpecialTokensAndGivesTextBack) {
  const auto tokenizer = Tokenizer::load(FP4MOE_DEMO_MODEL);
  ASSERT_TRUE(is_ok(tokenizer));
  const std::string text = "<|im_start|>user\nWhat is 12 + 30? Na\xC3\xAFve \xF0\x9F\x91\x8D<|im_end|>";
  const auto ids = tokenizer->encode(text, true);
  ASSERT_TRUE(is_ok(ids));
  EXPECT_EQ(ids->front(), 1);
  EXPECT_EQ(ids->back(), 2);
  EXPECT_EQ(tokenizer->decode(*ids, false), text);
}

}  // namespace
}  // namespace fp4moe
