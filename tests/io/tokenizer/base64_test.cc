#include "io/tokenizer/base64.h"

#include <gtest/gtest.h>

#include "io/tokenizer/to_base64.h"

namespace fp4moe {
namespace {

TEST(Base64, TheExamplesOfTheStandard) {
  const std::pair<const char*, const char*> examples[] = {{"", ""},
                                                          {"f", "Zg=="},
                                                          {"fo", "Zm8="},
                                                          {"foo", "Zm9v"},
                                                          {"foob", "Zm9vYg=="},
                                                          {"fooba", "Zm9vYmE="},
                                                          {"foobar", "Zm9vYmFy"},
                                                          {"\xFB\xFF\xBF", "+/+/"}};
  for (const auto& [bytes, text] : examples) {
    EXPECT_EQ(to_base64(bytes), text);
    EXPECT_EQ(from_base64(text), bytes);
  }
}

TEST(Base64, EveryShortStringComesBack) {
  for (int a = 0; a < 256; ++a)
    for (int b = -1; b < 256; ++b)
      for (int c : {-1, 0, 1, 63, 64, 255}) {
        std::string bytes(1, static_cast<char>(a));
        if (b >= 0) bytes += static_cast<char>(b);
        if (b >= 0 && c >= 0) bytes += static_cast<char>(c);
        ASSERT_EQ(from_base64(to_base64(bytes)), bytes) << a << " " << b << " " << c;
      }
}

// Every text of up to four letters of a small alphabet that is accepted is the encoding of its bytes.
TEST(Base64, NothingElseIsAccepted) {
  const std::string letters = "ABQwxgz09+/=- \n";
  int num_accepted = 0;
  std::string text;
  for (size_t code = 1, num = letters.size(); code < num * num * num * num; ++code) {
    text.clear();
    for (size_t rest = code; rest > 0; rest /= num) text += letters[rest % num];
    const std::optional<std::string> bytes = from_base64(text);
    if (!bytes) continue;
    ++num_accepted;
    ASSERT_EQ(to_base64(*bytes), text);
  }
  EXPECT_GT(num_accepted, 1000);
  for (const char* bad :
       {"Zg", "Zg=", "Zg===", "Zh==", "Zm9=", "=Zm9", "Z===", "====", "Zm9v=", "Zm9v\n", "Zm9vZ"})
    EXPECT_FALSE(from_base64(bad).has_value()) << bad;
}

}  // namespace
}  // namespace fp4moe
