#include "io/tokenizer/tiktoken.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <random>

#include "io/file.h"
#include "io/status_matchers.h"
#include "io/temp_folder.h"
#include "io/tokenizer/split_pattern.h"
#include "io/tokenizer/to_base64.h"
#include "io/tokenizer/tokenizer.h"
#include "io/tokenizer/unicode_text.h"

namespace fp4moe {
namespace {

const std::string kFolder = FP4MOE_IO_TEST_DATA "/tiktoken";

nlohmann::json read_json(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

// The 256 bytes, then `more`; each line's rank is its number.
std::string ranks_with(const std::vector<std::string>& more) {
  std::string text;
  for (int rank = 0; rank < 256 + std::ssize(more); ++rank) {
    const std::string token = rank < 256 ? std::string(1, static_cast<char>(rank)) : more[rank - 256];
    text += to_base64(token) + " " + std::to_string(rank) + "\n";
  }
  return text;
}

std::string config_with(const std::string& decoder) {
  return R"({"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": )" + decoder + "}";
}
const std::string kConfig = config_with(R"({"258": {"content": "<s>", "special": true}})");

std::vector<int32_t> encode(const Tokenizer& tokenizer, std::string_view text) {
  const auto ids = tokenizer.encode(text, true);
  EXPECT_TRUE(is_ok(ids));
  return ids.ok() ? *ids : std::vector<int32_t>();
}

TEST(Tiktoken, EncodesAsThePackage) {
  const auto tokenizer = Tokenizer::load(kFolder);
  ASSERT_TRUE(is_ok(tokenizer));
  const nlohmann::json expected = read_json(kFolder + "/expected.json");
  const nlohmann::json shared = read_json(FP4MOE_IO_TEST_DATA "/tokenizer_expected.json")["texts"];
  const auto expect_ids = [&](const nlohmann::json& texts, const nlohmann::json& ids) {
    ASSERT_EQ(texts.size(), ids.size());
    ASSERT_GT(texts.size(), 10u);
    for (size_t i = 0; i < texts.size(); ++i) {
      const auto text = texts[i].get<std::string>();
      EXPECT_EQ(encode(*tokenizer, text), ids[i].get<std::vector<int32_t>>()) << text;
      EXPECT_EQ(tokenizer->decode(ids[i].get<std::vector<int32_t>>(), false), text);
    }
  };
  expect_ids(shared, expected["ids"]);
  expect_ids(expected["texts"], expected["ids_of_texts"]);
}

TEST(Tiktoken, ReservedIdsAndFlagsOfSpecialTokens) {
  const auto tokenizer = Tokenizer::load(kFolder);
  ASSERT_TRUE(is_ok(tokenizer));
  const int32_t bos = tokenizer->find_token("[BOS]");
  ASSERT_GT(bos, 256);
  EXPECT_EQ(tokenizer->vocab_size(), bos + 256);
  EXPECT_EQ(tokenizer->find_token("[PAD]"), bos + 255);
  const std::string reserved = "<|reserved_token_" + std::to_string(bos + 9) + "|>";
  EXPECT_EQ(encode(*tokenizer, reserved), (std::vector<int32_t>{bos + 9}));
  for (int32_t id = 0; id < tokenizer->vocab_size(); ++id) EXPECT_TRUE(tokenizer->has_token(id));
  EXPECT_TRUE(tokenizer->is_special(bos));
  EXPECT_TRUE(tokenizer->is_special(bos + 9));
  EXPECT_FALSE(tokenizer->is_special(tokenizer->find_token("<think>")));
  EXPECT_FALSE(tokenizer->is_special(bos - 1));
  EXPECT_EQ(tokenizer->decode({bos, tokenizer->find_token("<think>"), bos + 9, bos + 7}, true), "<think>");
  EXPECT_EQ(tokenizer->decode({bos + 7}, false), "<\xC3\xA9|>");
}

// Merges go by the rank of the result, whichever the parts; a word that is a token is never merged.
TEST(Tiktoken, MergesByTheRankOfTheResult) {
  const auto tokenizer = Tokenizer::parse_tiktoken(ranks_with({"bc", "ab", "cd", "abcd", "xyz"}),
                                                   config_with(R"({"261": {"content": "<s>"}})"));
  ASSERT_TRUE(is_ok(tokenizer));
  EXPECT_EQ(encode(*tokenizer, "abc"), (std::vector<int32_t>{'a', 256}));
  EXPECT_EQ(encode(*tokenizer, "abcd"), (std::vector<int32_t>{259})) << "a whole word";
  EXPECT_EQ(encode(*tokenizer, "aabcd"), (std::vector<int32_t>{'a', 'a', 256, 'd'}));
  EXPECT_EQ(encode(*tokenizer, "xyz"), (std::vector<int32_t>{260})) << "no merge makes it";
  EXPECT_EQ(encode(*tokenizer, "xyzx"), (std::vector<int32_t>{'x', 'y', 'z', 'x'}));
  EXPECT_EQ(encode(*tokenizer, "a<s>b"), (std::vector<int32_t>{'a', 261, 'b'}));
}

TEST(Tiktoken, RandomBytesComeBackAsText) {
  const auto tokenizer = Tokenizer::load(kFolder);
  ASSERT_TRUE(is_ok(tokenizer));
  std::mt19937 rng(7);
  for (int i = 0; i < 3000; ++i) {
    std::string bytes(rng() % 40, '\0');
    const bool is_wild = i % 2 == 0;
    for (char& c : bytes) c = is_wild ? static_cast<char>(rng()) : "ab '\xE6\x97\xA5\n1!\xC3\xA9"[rng() % 12];
    std::string text;
    append_lossy_utf8(bytes, &text);
    const std::vector<int32_t> ids = encode(*tokenizer, bytes);
    EXPECT_EQ(tokenizer->decode(ids, false), text);
    IncrementalDetokenizer detokenizer(*tokenizer, false);
    std::string pieces;
    for (const int32_t id : ids) pieces += detokenizer.push(id);
    EXPECT_EQ(pieces + detokenizer.finish(), text);
    EXPECT_LE(std::ssize(text), std::ssize(ids) * tokenizer->max_bytes_per_token());
  }
}

TEST(Tiktoken, TakesTimeNearlyLinearInHostileText) {
  const auto tokenizer = Tokenizer::load(kFolder);
  ASSERT_TRUE(is_ok(tokenizer));
  for (std::string unit :
       {"a", " ", "\n", "1", "!", "A", "\xCC\x81", "\xE6\x97\xA5", "\xE3\x81\x82", "\xFF"}) {
    std::string text;
    while (text.size() < size_t{1} << 20) text += unit;
    const auto start = std::chrono::steady_clock::now();
    const auto ids = tokenizer->encode(text + "x", false);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    ASSERT_TRUE(is_ok(ids)) << unit;
    EXPECT_LT(seconds.count(), 60) << unit;  // quadratic time would be 2^40 steps
  }
}

TEST(Tiktoken, NamesTheLineThatIsWrong) {
  const std::string good = ranks_with({"ab", "bc"});  // lines 1 to 258
  ASSERT_TRUE(is_ok(Tokenizer::parse_tiktoken(good, kConfig)));
  ASSERT_TRUE(is_ok(Tokenizer::parse_tiktoken("\n" + good + "\n\n", kConfig)));
  const std::pair<std::string, std::vector<std::string>> cases[] = {
      {good + "YWJj", {"line 259", "rank ''", "4194303"}},
      {good + "YWJj ", {"line 259", "rank"}},
      {good + "YWJj 2x", {"line 259", "2x"}},
      {good + "YWJj -1", {"line 259", "-1"}},
      {good + "YWJj 258 1", {"line 259", "258 1"}},
      {good + "YWJj 99999999999", {"line 259", "99999999999"}},
      {good + "YWJj 4194304", {"line 259", "4194304"}},
      {good + "YWJj 300", {"line 259", "300", "259 tokens"}},
      {good + "YWJj 25", {"line 259", "rank 25", "line 26"}},
      {good + "YWI= 258", {"line 259", "same token", "line 257"}},
      {good + "YWJ 258", {"line 259", "YWJ", "base64"}},
      {good + "YW\xFFj 258", {"line 259", "YW\\xffj", "base64"}},
      {good + " 258", {"line 259", "0 bytes", "1 to 1024"}},
      {good + to_base64(std::string(1025, 'x')) + " 258", {"line 259", "1025 bytes"}},
      {"", {"no tokens"}},
      {"YQ== 0\n", {"no token for byte 0"}},
  };
  for (const auto& [text, parts] : cases) {
    const auto result = Tokenizer::parse_tiktoken(
        text, text == "YQ== 0\n" ? config_with(R"({"1": {"content": "<s>"}})") : kConfig);
    for (const std::string& part : parts)
      EXPECT_TRUE(fails_with(result, StatusCode::kDataLoss, {"tiktoken.model", part}))
          << text.substr(text.size() - std::min<size_t>(text.size(), 30));
  }
}

// Every file that ends too early is refused: its special tokens do not follow its ranks, or its last line is
// malformed or repeats a rank.
TEST(Tiktoken, RefusesAFileThatIsCutShort) {
  const std::string good = ranks_with({"ab", "bc"});
  for (size_t size = good.size() - 400; size + 1 < good.size(); ++size)
    EXPECT_FALSE(Tokenizer::parse_tiktoken(good.substr(0, size), kConfig).ok()) << size;
}

TEST(Tiktoken, NamesWhatIsWrongWithTheConfiguration) {
  const std::string ranks = ranks_with({"ab", "bc"});
  constexpr StatusCode kInvalid = StatusCode::kInvalidArgument, kRefused = StatusCode::kUnsupported;
  struct Bad {
    std::string config;
    StatusCode code;
    std::vector<std::string> parts;
  };
  const Bad cases[] = {
      {"{", StatusCode::kDataLoss, {}},
      {"{}", kInvalid, {"tokenizer_class is missing"}},
      {R"({"tokenizer_class": "QWenTokenizer"})", kRefused, {"QWenTokenizer", "TikTokenTokenizer"}},
      {R"({"tokenizer_class": "TikTokenTokenizer"})", kInvalid, {"added_tokens_decoder", "missing"}},
      {config_with("[]"), kInvalid, {"added_tokens_decoder"}},
      {config_with("{}"), kInvalid, {"special tokens"}},
      {config_with(R"({"x": {"content": "a"}})"), kInvalid, {"added_tokens_decoder.x", "token id"}},
      {config_with(R"({"0258": {"content": "a"}})"), kInvalid, {"added_tokens_decoder.0258"}},
      {config_with(R"({"257": {"content": "a"}})"), kInvalid, {"decoder.257", "258", "258 tokens"}},
      {config_with(R"({"259": {"content": "a"}})"), kInvalid, {"decoder.259", "first id to be 258"}},
      {config_with(R"({"258": {"content": "a"}, "514": {"content": "b"}})"),
       kInvalid,
       {"decoder.514", "below 514"}},
      {config_with(R"({"258": {}})"), kInvalid, {"decoder.258.content is missing"}},
      {config_with(R"({"258": {"content": ""}})"), kInvalid, {"decoder.258.content"}},
      {config_with(R"({"258": {"content": "a", "special": 1}})"), kInvalid, {"decoder.258.special"}},
      {config_with(R"({"258": {"content": "a", "lstrip": true}})"), kRefused, {"decoder.258.lstrip"}},
      {config_with(R"({"258": {"content": "a"}, "259": {"content": "a"}})"),
       kInvalid,
       {"decoder.259.content"}},
      {config_with(R"({"258": {"content": "<|reserved_token_300|>"}})"), kInvalid, {"decoder.300.content"}},
  };
  for (const Bad& bad : cases) {
    const auto result = Tokenizer::parse_tiktoken(ranks, bad.config);
    EXPECT_TRUE(fails_with(result, bad.code, {"tokenizer_config.json"})) << bad.config;
    for (const std::string& part : bad.parts) EXPECT_TRUE(fails_with(result, bad.code, {part})) << bad.config;
  }
}

TEST(Tiktoken, TooManyWaysToMergeAreRefused) {
  std::vector<std::string> tokens;  // letters a, then letters b: each part of a token is a token
  for (size_t num_a = 0; num_a <= 180; ++num_a)
    for (size_t num_b = 0; num_b <= 180; ++num_b)
      if (num_a + num_b > 1) tokens.push_back(std::string(num_a, 'a') + std::string(num_b, 'b'));
  const std::string config =
      config_with("{\"" + std::to_string(256 + tokens.size()) + R"(": {"content": "<s>"}})");
  EXPECT_TRUE(fails_with(Tokenizer::parse_tiktoken(ranks_with(tokens), config), StatusCode::kDoesNotFit,
                         {"tiktoken.model", "4194304"}));
}

TEST(Tiktoken, TokenizerJsonWinsAndBothFilesAreNeeded) {
  const TempFolder folder;
  const std::string ranks = *read_text_file(kFolder + "/tiktoken.model", 1 << 20);
  ASSERT_TRUE(is_ok(write_text_file(folder.file("tiktoken.model"), ranks)));
  EXPECT_EQ(tokenizer_file(folder.path()), folder.file("tiktoken.model"));
  EXPECT_TRUE(fails_with(Tokenizer::load(folder.path()), StatusCode::kNotFound,
                         {folder.file("tokenizer_config.json")}));
  std::filesystem::copy_file(kFolder + "/tokenizer_config.json", folder.file("tokenizer_config.json"));
  const auto by_folder = Tokenizer::load(folder.path()),
             by_file = Tokenizer::load(folder.file("tiktoken.model"));
  ASSERT_TRUE(is_ok(by_folder));
  ASSERT_TRUE(is_ok(by_file));
  EXPECT_EQ(by_folder->vocab_size(), by_file->vocab_size());
  std::filesystem::copy_file(FP4MOE_IO_TEST_DATA "/tokenizer_gpt2.json", folder.file("tokenizer.json"));
  EXPECT_EQ(tokenizer_file(folder.path()), folder.file("tokenizer.json"));
  const auto json = Tokenizer::load(folder.path());
  ASSERT_TRUE(is_ok(json));
  EXPECT_EQ(json->find_token("[BOS]"), -1);
}

// [A&&[^B]] matches exactly the characters that [A] matches and [B] does not.
TEST(SplitPattern, AnIntersectionOfClassesMatchesWhatBothMatch) {
  std::string text;  // every character
  for (char32_t c = 1; c < 0x110000; ++c)
    if (c < 0xD800 || c > 0xDFFF) append_utf8(c, &text);
  const auto matches_of = [&](const std::string& pattern) {
    const auto translated = translate_pattern(pattern);
    EXPECT_TRUE(is_ok(translated));
    const auto compiled = SplitPattern::compile(*translated);
    EXPECT_TRUE(is_ok(compiled));
    std::vector<SplitPattern::Range> matches;
    EXPECT_TRUE(is_ok(compiled->find_all(text, &matches)));
    return matches;
  };
  const std::pair<const char*, const char*> cases[] = {
      {R"(\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M})", R"(\p{Han})"},
      {R"(\p{Ll}\p{Lm}\p{Lo}\p{M})", R"(\p{Han})"},
      {R"(\p{L})", "a-y\\u00e9\\s"},
      {R"(\p{P}\p{Nd}\p{Cn})", R"(\p{Pd}5)"},
  };
  for (const auto& [members, without] : cases) {
    const std::string a = members, b = without;
    const auto all = matches_of("[" + a + "]"), actual = matches_of("[" + a + "&&[^" + b + "]]");
    const auto removed = matches_of("[" + b + "]");
    std::vector<SplitPattern::Range> expected;
    std::set_difference(all.begin(), all.end(), removed.begin(), removed.end(), std::back_inserter(expected));
    EXPECT_GT(actual.size(), 400u) << a;
    EXPECT_LT(actual.size(), all.size()) << a;
    EXPECT_EQ(actual, expected) << a;
  }
  for (const char* bad :
       {"[a&&[^b]]", "[\\p{L}&&[b]]", "[\\p{L}&&\\p{Lu}]", "[^\\p{L}&&[^b]]", "[\\p{L}&&[^b]c]",
        "[\\p{L}&&[^b", "[\\p{Han}&&[^b]]", "[\\p{L}&&[^\\p{L}&&[^a]]]", "[\\p{Lu}\\p{L}&&[^b]]",
        "(?i:[\\p{L}&&[^b]])", "[\\p{Lx}&&[^b]]", "[\\P{L}&&[^b]]", "[\\p{L}&&[^]]]"})
    EXPECT_TRUE(fails_with(translate_pattern(bad), StatusCode::kUnsupported, {bad})) << bad;
}

}  // namespace
}  // namespace fp4moe
