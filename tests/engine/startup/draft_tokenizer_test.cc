#include "engine/startup/draft_tokenizer.h"

#include <gtest/gtest.h>

#include "engine/fake_tokenizer.h"

namespace fp4moe {
namespace {

TEST(DraftTokenizer, EqualTokenizersPass) {
  EXPECT_TRUE(check_draft_tokenizer(fake_tokenizer({"<a>", "b"}), fake_tokenizer({"<a>", "b"})).ok());
}

// The message names the first id that differs, and both tokens.
TEST(DraftTokenizer, TheFirstDifferenceIsNamed) {
  const Tokenizer target = fake_tokenizer({"x", "y", "z"});
  const auto refusal = [&](const std::vector<std::string>& words) {
    const Status status = check_draft_tokenizer(target, fake_tokenizer(words));
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    return status.message();
  };
  EXPECT_NE(refusal({"x", "w", "v"}).find("id 258 is 'w' instead of 'y'"), std::string::npos);
  EXPECT_NE(refusal({"x"}).find("id 258 is no token instead of 'y'"), std::string::npos);
  EXPECT_NE(refusal({"x", "y", "z", "a"}).find("id 260 is 'a' instead of no token"), std::string::npos);
}

TEST(DraftTokenizer, ASpecialTokenHasToBeSpecial) {
  const auto tokenizer = [](bool special) {
    return Tokenizer::
        parse(std::string(R"({"added_tokens":[{"id":1,"content":"<s>","special":)") +
              (special ? "true" : "false") +
              R"(,"single_word":false,"lstrip":false,"rstrip":false,"normalized":false}],"normalizer":null,)"
              R"("pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},)"
              R"("decoder":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},)"
              R"("post_processor":null,"model":{"type":"BPE","vocab":{"a":0},"merges":[]}})")
            .value();
  };
  EXPECT_TRUE(check_draft_tokenizer(tokenizer(true), tokenizer(true)).ok());
  EXPECT_NE(check_draft_tokenizer(tokenizer(true), tokenizer(false))
                .message()
                .find("id 1 is '<s>' instead of the special token '<s>'"),
            std::string::npos);
}

}  // namespace
}  // namespace fp4moe
