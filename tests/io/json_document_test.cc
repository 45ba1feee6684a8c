#include "io/json_document.h"

#include <gtest/gtest.h>

namespace fp4moe {
namespace {

std::string repeated(const std::string& text, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

void expect_refused(const std::string& text, const JsonLimits& limits, const std::string& word) {
  const auto json = parse_json(text, "the document", limits);
  ASSERT_FALSE(json.ok()) << word;
  EXPECT_EQ(json.status().code(), StatusCode::kDataLoss);
  EXPECT_NE(json.status().message().find(word), std::string::npos) << json.status().message();
  EXPECT_LT(json.status().message().size(), 400u);
}

TEST(JsonDocument, LimitsAreInclusive) {
  const JsonLimits limits{.max_depth = 2, .max_values = 5, .max_containers = 2, .max_keys = 2};
  const auto json = parse_json(R"({"a": [1, 2], "b": 3})", "the document", limits);
  ASSERT_TRUE(json.ok()) << json.status().message();
  EXPECT_EQ(json->at("b"), 3);
  expect_refused(R"({"a": [[1]]})", {.max_depth = 2}, "nested deeper than 2");
  expect_refused(R"({"a": [1, 2, 3], "b": 3})", limits, "more than 5 values");
  expect_refused(R"([[], []])", limits, "more than 2 arrays and objects");
  expect_refused(R"({"a": 1, "b": 2, "c": 3})", limits, "more than 2 keys");
}

// Stack use does not grow with the nesting depth, even if brackets are not closed, and the message stays
// short.
TEST(JsonDocument, DeepAndLongTextsAreRefusedWithShortMessages) {
  for (const int depth : {65, 100'000, 5'000'000}) {
    expect_refused(repeated("[", depth), {}, "nested deeper than 64");
    expect_refused(repeated("[", depth) + repeated("]", depth), {}, "nested deeper than 64");
    expect_refused(repeated("{\"a\":", depth), {}, "nested deeper than 64");
  }
  const std::string key(100'000, '\x1b');
  const std::string escaped = repeated("\\u001b", 100'000);
  expect_refused("{\"" + escaped + "\": 1, \"" + escaped + "\": 2}", {}, "appears twice");
  expect_refused("{\"" + key + "\": 1}", {}, "not valid JSON");
}

}  // namespace
}  // namespace fp4moe
