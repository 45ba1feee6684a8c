#include "engine/startup/draft_checkpoint.h"

#include <gtest/gtest.h>

#include "engine/fake_tokenizer.h"

namespace fp4moe {
namespace {

TEST(DraftTokenizer, EqualTokenizersPass) {
  EXPECT_TRUE(compare_tokenizers(fake_tokenizer({"<a>", "bb"}), fake_tokenizer({"<a>", "bb"})).ok());
}

// The message names the first id that differs, and both tokens.
TEST(DraftTokenizer, TheFirstDifferenceIsNamed) {
  const Tokenizer target = fake_tokenizer({"xx", "yy", "zz"});
  const auto refusal = [&](const std::vector<std::string>& words) {
    const Status status = compare_tokenizers(target, fake_tokenizer(words));
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    return status.message();
  };
  EXPECT_NE(refusal({"xx", "ww", "vv"}).find("id 258 is 'ww' instead of 'yy'"), std::string::npos);
  EXPECT_NE(refusal({"xx"}).find("id 258 is no token instead of 'yy'"), std::string::npos);
  EXPECT_NE(refusal({"xx", "yy", "zz", "aa"}).find("id 260 is 'aa' instead of no token"), std::string::npos);
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
  EXPECT_TRUE(compare_tokenizers(tokenizer(true), tokenizer(true)).ok());
  EXPECT_NE(compare_tokenizers(tokenizer(true), tokenizer(false))
                .message()
                .find("id 1 is '<s>' instead of the special token '<s>'"),
            std::string::npos);
}

}  // namespace
}  // namespace fp4moe
