#include "io/tokenizer/tokenizer.h"

#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "io/status_matchers.h"
#include "io/temp_folder.h"
#include "io/tokenizer/split_pattern.h"
#include "io/tokenizer/unicode_text.h"

namespace fp4moe {
namespace {

using Json = nlohmann::json;

std::string data_path(const std::string& name) { return FP4MOE_IO_TEST_DATA "/tokenizer_" + name + ".json"; }

Json read_json(const std::string& path) {
  std::ifstream file(path);
  return Json::parse(file);
}

// A tokenizer.json over the letters a, b and c, with the given changes (a JSON merge patch).
std::string small_config(const std::string& patch) {
  Json config =
      Json::parse(R"({"added_tokens": [{"id": 5, "content": "<s>", "single_word": false, "lstrip": false,
    "rstrip": false, "normalized": false, "special": true}],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false},
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}, "merges": ["a b", "ab c"]}})");
  config.merge_patch(Json::parse(patch));
  return config.dump();
}

std::vector<int32_t> encode(const Tokenizer& tokenizer, std::string_view text) {
  auto ids = tokenizer.encode(text, false);
  EXPECT_TRUE(is_ok(ids));
  return ids.ok() ? *ids : std::vector<int32_t>();
}

std::string decode_incrementally(const Tokenizer& tokenizer, const std::vector<int32_t>& ids, bool skip) {
  IncrementalDetokenizer detokenizer(tokenizer, skip);
  std::string text;
  for (int32_t id : ids) {
    const std::string piece = detokenizer.push(id);
    EXPECT_TRUE(is_valid_utf8(piece));
    text += piece;
  }
  return text + detokenizer.finish();
}

class TokenizerFixture : public testing::TestWithParam<std::string> {};

TEST_P(TokenizerFixture, EncodesAsHuggingFace) {
  const auto tokenizer = Tokenizer::load(data_path(GetParam()));
  ASSERT_TRUE(is_ok(tokenizer));
  const Json expected = read_json(data_path("expected"));
  const Json& ids = expected["tokenizers"][GetParam()]["ids"];
  ASSERT_GT(ids.size(), 100u);
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto actual = tokenizer->encode(expected["texts"][i].get<std::string>(), true);
    ASSERT_TRUE(is_ok(actual));
    EXPECT_EQ(*actual, ids[i].get<std::vector<int32_t>>()) << expected["texts"][i];
  }
}

TEST_P(TokenizerFixture, DecodesAsHuggingFaceWholeAndInPieces) {
  const auto tokenizer = Tokenizer::load(data_path(GetParam()));
  ASSERT_TRUE(is_ok(tokenizer));
  const Json expected = read_json(data_path("expected"));
  for (const Json& row : expected["tokenizers"][GetParam()]["decoded"]) {
    const auto ids = row[0].get<std::vector<int32_t>>();
    for (bool skip : {false, true}) {
      EXPECT_EQ(tokenizer->decode(ids, skip), row[skip ? 2 : 1].get<std::string>()) << row[0];
      EXPECT_EQ(decode_incrementally(*tokenizer, ids, skip), row[skip ? 2 : 1].get<std::string>()) << row[0];
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, TokenizerFixture,
                         testing::Values("gpt2", "llama3", "qwen", "gpt_oss", "deepseek", "flags"));

TEST(TokenizerDemo, KnowsItsSpecialTokensAndGivesTextBack) {
  const auto tokenizer = Tokenizer::load(FP4MOE_DEMO_MODEL);
  ASSERT_TRUE(is_ok(tokenizer));
  const std::string text = "<|im_start|>user\nWhat is 12 + 30? Na\xC3\xAFve \xF0\x9F\x91\x8D<|im_end|>";
  const auto ids = encode(*tokenizer, text);
  EXPECT_EQ(ids.front(), tokenizer->find_token("<|im_start|>"));
  EXPECT_EQ(ids.back(), tokenizer->find_token("<|im_end|>"));
  EXPECT_EQ(tokenizer->decode(ids, false), text);
}

TEST(Tokenizer, IdsWithoutATokenDecodeToNothing) {
  const auto tokenizer =
      Tokenizer::parse(small_config(R"({"model": {"vocab": {"x": 9}}, "added_tokens": []})"));
  ASSERT_TRUE(is_ok(tokenizer));
  EXPECT_EQ(tokenizer->vocab_size(), 10);
  EXPECT_FALSE(tokenizer->has_token(7));
  EXPECT_EQ(tokenizer->decode({-1, 4, 7, 9, 10, 1 << 30}, true), "abcx");
  EXPECT_EQ(decode_incrementally(*tokenizer, {-1, 4, 7, 9, 10, 1 << 30}, true), "abcx");
  EXPECT_EQ(tokenizer->token_bytes(7), "");
  EXPECT_EQ(tokenizer->find_token("abcd"), -1);
}

TEST(Tokenizer, BytesWithoutATokenVanishAndTheirNeighboursMerge) {
  const auto tokenizer = Tokenizer::parse(small_config("{}"));
  ASSERT_TRUE(is_ok(tokenizer));
  EXPECT_EQ(encode(*tokenizer, "a?bc<s>b"), (std::vector<int32_t>{4, 5, 1}));
}

TEST(Tokenizer, UnknownBytesAreFusedOnlyIfAsked) {
  for (bool fuse : {false, true}) {
    const std::string patch =
        R"({"model": {"unk_token": "c", "fuse_unk": )" + std::string(fuse ? "true}}" : "false}}");
    const auto tokenizer = Tokenizer::parse(small_config(patch));
    ASSERT_TRUE(is_ok(tokenizer));
    EXPECT_EQ(encode(*tokenizer, "b??a"),
              fuse ? (std::vector<int32_t>{1, 2, 0}) : (std::vector<int32_t>{1, 2, 2, 0}));
  }
}

TEST(Tokenizer, TakesTimeNearlyLinearInHostileText) {
  for (const char* name : {"gpt2", "llama3", "qwen", "gpt_oss", "deepseek"}) {
    const auto tokenizer = Tokenizer::load(data_path(name));
    ASSERT_TRUE(is_ok(tokenizer));
    for (std::string unit :
         {"a", " ", "\n", "1", "!", "A", "\xF0\x9F\x91\x8D", "\xCC\x81\xCC\xA3", "\xE6\x97\xA5", "\xFF"}) {
      std::string text;
      while (text.size() < size_t{1} << 20) text += unit;
      text += "x";
      const auto start = std::chrono::steady_clock::now();
      const auto ids = tokenizer->encode(text, false);
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      ASSERT_TRUE(is_ok(ids)) << name << " " << unit;
      // Quadratic time would be 2^40 steps; even a slow machine under a sanitizer stays far below this limit.
      EXPECT_LT(seconds.count(), 60) << name << " " << unit;
    }
  }
}

TEST(Tokenizer, FindsTheSpecialTokensThatItEncodes) {
  for (const char* name : {"gpt2", "llama3", "qwen", "gpt_oss", "deepseek"}) {
    const auto tokenizer = Tokenizer::load(data_path(name));
    ASSERT_TRUE(is_ok(tokenizer));
    std::string text = "a <|endoftext|>b<|im_end|> <|eot_id|><|end|>\xFF";
    for (int32_t id = 0; id < tokenizer->vocab_size(); ++id)
      if (tokenizer->is_special(id) && id % 3 == 0) text += "x" + std::string(tokenizer->token_bytes(id));
    const auto ids = tokenizer->encode(text, false);
    ASSERT_TRUE(is_ok(ids));
    std::set<int32_t> expected;
    for (const int32_t id : *ids)
      if (tokenizer->is_special(id)) expected.insert(id);
    EXPECT_FALSE(expected.empty()) << name;
    const std::vector<int32_t> found = tokenizer->find_special_tokens(text);
    EXPECT_EQ(found, std::vector<int32_t>(expected.begin(), expected.end())) << name;
    EXPECT_TRUE(tokenizer->find_special_tokens("plain").empty()) << name;
  }
}

TEST(Tokenizer, BoundsTheBytesOfATextByItsTokens) {
  for (const char* name : {"gpt2", "llama3", "qwen", "gpt_oss", "deepseek"}) {
    const auto tokenizer = Tokenizer::load(data_path(name));
    ASSERT_TRUE(is_ok(tokenizer));
    const int64_t most = tokenizer->max_bytes_per_token();
    for (std::string unit :
         {" ", "a", "\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8", "\xE2\x84\xAA", "=", "\n", "\xFF"}) {
      std::string text;
      while (text.size() < 20000) text += unit;
      if (most > 0) {
        EXPECT_LE(std::ssize(text) / most, std::ssize(encode(*tokenizer, text))) << name << " " << unit;
      }
    }
    for (int32_t id = 0; most > 0 && id < tokenizer->vocab_size(); ++id)
      EXPECT_LE(std::ssize(tokenizer->token_bytes(id)), most) << name;
  }
  EXPECT_EQ(Tokenizer::parse(small_config("{}"))->max_bytes_per_token(), 0)
      << "the vocabulary has no token for most bytes";
}

// The sanitizers need memory for themselves, and AddressSanitizer delays freeing it.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// A list of all words and pieces took 40 bytes per byte of this text.
TEST(Tokenizer, HoldsNoListOfWords) {
  const auto tokenizer = Tokenizer::load(data_path("gpt_oss"));
  ASSERT_TRUE(is_ok(tokenizer));
  const auto peak_kib = [] {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);)
      if (line.rfind("VmHWM:", 0) == 0) return std::stoll(line.substr(6));
    return 0LL;
  };
  std::string text;
  while (text.size() < size_t{8} << 20) text += "a.b ";
  std::ofstream("/proc/self/clear_refs") << "5";  // resets the peak to the current value
  const int64_t before = peak_kib();
  const auto ids = tokenizer->encode(text, false);
  ASSERT_TRUE(is_ok(ids));
  EXPECT_LT((peak_kib() - before) << 10, 12 * std::ssize(text));
}
#endif

TEST(Tokenizer, RefusesTextOverTheLimit) {
  const auto tokenizer = Tokenizer::parse(small_config("{}"));
  ASSERT_TRUE(is_ok(tokenizer));
  EXPECT_TRUE(fails_with(tokenizer->encode(std::string((16 << 20) + 1, 'a'), false),
                         StatusCode::kInvalidArgument, {"16777217", "16777216"}));
}

struct BadConfig {
  const char* patch;
  StatusCode code;
  std::vector<std::string> parts;
};

TEST(Tokenizer, NamesWhatIsWrongWithAFile) {
  constexpr StatusCode kInvalid = StatusCode::kInvalidArgument, kRefused = StatusCode::kUnsupported;
  const BadConfig cases[] = {
      {R"({"version": "2.0"})", kInvalid, {"version", "2.0"}},
      {R"({"model": null})", kInvalid, {"model.vocab", "missing"}},
      {R"({"model": {"type": "Unigram"}})", kRefused, {"model.type", "Unigram", "BPE"}},
      {R"({"model": {"vocab": [1]}})", kInvalid, {"model.vocab"}},
      {R"({"model": {"vocab": {"a": -1}}})", kInvalid, {"model.vocab", "\"a\"", "-1"}},
      {R"({"model": {"vocab": {"a": 5000000000}}})", kInvalid, {"model.vocab", "5000000000"}},
      {R"({"model": {"vocab": {"a": 1.5}}})", kInvalid, {"model.vocab", "1.5"}},
      {R"({"model": {"vocab": {"a": 1}}})", kInvalid, {"model.vocab", "\"b\""}},
      {R"({"model": {"merges": ["a b", "a z"]}})", kInvalid, {"model.merges[1]", "\"z\""}},
      {R"({"model": {"merges": ["b c"]}})", kInvalid, {"model.merges[0]", "\"bc\""}},
      {R"({"model": {"merges": ["ab"]}})", kInvalid, {"model.merges[0]", "one space"}},
      {R"({"model": {"merges": [["a", "b", "c"]]}})", kInvalid, {"model.merges[0]", "pair"}},
      {R"({"model": {"merges": [["a", 1]]}})", kInvalid, {"model.merges[0][1]"}},
      {R"({"model": {"merges": {}}})", kInvalid, {"model.merges", "array"}},
      {R"({"model": {"dropout": 0.1}})", kRefused, {"model.dropout", "0.1"}},
      {R"({"model": {"byte_fallback": true}})", kRefused, {"model.byte_fallback"}},
      {R"({"model": {"continuing_subword_prefix": "##"}})", kRefused, {"continuing_subword_prefix", "##"}},
      {R"({"model": {"unk_token": "?"}})", kInvalid, {"model.unk_token", "?"}},
      {R"({"added_tokens": [{"id": 5}]})", kInvalid, {"added_tokens[0].content", "missing"}},
      {R"({"added_tokens": 3})", kInvalid, {"added_tokens", "array"}},
      {R"({"normalizer": {"type": "Lowercase"}})", kRefused, {"normalizer", "Lowercase", "NFC"}},
      {R"({"pre_tokenizer": null})", kRefused, {"pre_tokenizer", "ByteLevel"}},
      {R"({"pre_tokenizer": {"type": "Metaspace"}})", kRefused, {"pre_tokenizer", "Metaspace"}},
      {R"({"pre_tokenizer": {"type": "Split", "behavior": "Sideways"}})",
       kInvalid,
       {"pre_tokenizer.behavior", "Sideways"}},
      {R"({"pre_tokenizer": {"type": "Split", "behavior": "Removed", "invert": false, "pattern": {"Regex": "(a"}}})",
       kInvalid,
       {"pre_tokenizer.pattern.Regex", "(a"}},
      {R"({"pre_tokenizer": {"type": "Split", "behavior": "Removed", "invert": false, "pattern": {"Regex": "\\bx"}}})",
       kRefused,
       {"pre_tokenizer.pattern.Regex", "\\b"}},
      {R"({"post_processor": {"type": "BertProcessing"}})", kRefused, {"post_processor", "BertProcessing"}},
      {R"({"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x"}}]}})",
       kInvalid,
       {"post_processor.special_tokens.x.ids", "missing"}},
      {R"({"decoder": {"type": "WordPiece"}})", kRefused, {"decoder", "WordPiece"}},
  };
  for (const BadConfig& bad : cases) {
    const auto result = Tokenizer::parse(small_config(bad.patch));
    for (const std::string& part : bad.parts) EXPECT_TRUE(fails_with(result, bad.code, {part})) << bad.patch;
  }
  EXPECT_TRUE(fails_with(Tokenizer::parse("{"), StatusCode::kDataLoss, {"tokenizer.json"}));
  EXPECT_TRUE(fails_with(Tokenizer::parse("[]"), kInvalid, {"object"}));
  EXPECT_TRUE(fails_with(Tokenizer::parse(std::string(100000, '[')), StatusCode::kDataLoss, {"deeper"}));
}

TEST(Tokenizer, AFolderWithoutTheFileNamesTheFile) {
  const TempFolder empty;
  EXPECT_TRUE(
      fails_with(Tokenizer::load(empty.path()), StatusCode::kNotFound, {empty.path() + "/tokenizer.json"}));
}

TEST(Tokenizer, RefusesAddedTokensThatHuggingFaceWouldRenumber) {
  Json config = Json::parse(small_config("{}"));
  config["added_tokens"][0]["id"] = 7;
  EXPECT_TRUE(fails_with(Tokenizer::parse(config.dump()), StatusCode::kInvalidArgument,
                         {"added_tokens[0].id", "7", "5"}));
  config["added_tokens"][0]["id"] = 5;
  config["added_tokens"][1] = config["added_tokens"][0];
  config["added_tokens"][1]["id"] = 6;
  EXPECT_TRUE(fails_with(Tokenizer::parse(config.dump()), StatusCode::kInvalidArgument,
                         {"added_tokens[1].content", "<s>"}));
}

TEST(SplitPattern, ACostlyPatternEndsInAnErrorNotInSilence) {
  const auto pattern = SplitPattern::compile("(?:a|aa|aaa)+b|(?:x+x+)+y");
  ASSERT_TRUE(is_ok(pattern));
  std::vector<SplitPattern::Range> matches;
  EXPECT_TRUE(
      fails_with(pattern->find_all(std::string(200, 'a'), &matches), StatusCode::kDoesNotFit, {"200 bytes"}));
}

TEST(SplitPattern, RefusesWhatTheLibrariesReadDifferently) {
  for (const char* pattern :
       {"^a",         "a$",   "[a[b]]",  "[a&&b]",        "[]a]",         "\\bA",  "\\Z", "\\1",
        "\\p{Greek}", "\\pL", "(?m:a)",  "(?<n>a)",       "a{,3}",        "a{2}+", "{",   "\\x4",
        "\\",         "[a",   "(?i:ss)", "(?i:\xC3\xA9)", "(?i:\\p{Lu})", "[\\W]", "\\R", "\\X"})
    EXPECT_TRUE(fails_with(translate_pattern(pattern), StatusCode::kUnsupported, {pattern})) << pattern;
}

TEST(UnicodeText, EachMaximalSubpartBecomesOneReplacement) {
  const std::pair<const char*, const char*> cases[] = {{"a\xC3", "a?"},
                                                       {"\xE6\x97", "?"},
                                                       {"\xE6\x97\x61", "?a"},
                                                       {"\xF0\x9F\x91", "?"},
                                                       {"\xC0\x80", "??"},
                                                       {"\xED\xA0\x80", "???"},
                                                       {"\xF4\x90\x80\x80", "????"},
                                                       {"\xF0\x80\x80\x80", "????"},
                                                       {"\xFF\xFE", "??"},
                                                       {"\x80\xBF", "??"},
                                                       {"\xF1\x80\x80\xE1\x80\xC2\x62", "???b"}};
  for (const auto& [bytes, marks] : cases) {
    std::string expected, actual;
    for (const char* c = marks; *c; ++c) expected += *c == '?' ? "\xEF\xBF\xBD" : std::string(1, *c);
    append_lossy_utf8(bytes, &actual);
    EXPECT_EQ(actual, expected);
  }
}

}  // namespace
}  // namespace fp4moe
