// Any bytes as text and as ids for a tokenizer that has every byte and no normalizer: encoding and decoding
// restores the text, and incremental decoding equals decoding all ids at once.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "io/tokenizer/bpe.h"
#include "io/tokenizer/tokenizer.h"
#include "io/tokenizer/unicode_text.h"

namespace {

using fp4moe::Tokenizer;

// Has the split pattern of gpt-oss, and merges of repeated and consecutive letters, digits, spaces and parts
// of characters.
Tokenizer make_tokenizer() {
  nlohmann::json vocab, merges = nlohmann::json::array();
  for (int byte = 0; byte < 256; ++byte) vocab[fp4moe::byte_level_of(static_cast<uint8_t>(byte))] = byte;
  const auto merge = [&](const std::string& left, const std::string& right) {
    vocab.emplace(left + right, vocab.size());
    merges.push_back({left, right});
  };
  for (std::string pair : {"aa", "ab", "bc", "11", "12", "!!", "'s"})
    merge(pair.substr(0, 1), pair.substr(1));
  merge("aa", "a"), merge("a", "aa"), merge("ab", "c"), merge("a", "bc");
  const auto byte = [](int value) { return fp4moe::byte_level_of(static_cast<uint8_t>(value)); };
  merge(byte(' '), byte(' ')), merge(byte('\n'), byte('\n')), merge(byte(0xF0), byte(0x9F));
  const char* upper = R"([\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])";
  const char* lower = R"([\p{Ll}\p{Lm}\p{Lo}\p{M}])";
  const std::string tail = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?|)", head = R"([^\r\n\p{L}\p{N}]?)";
  const std::string pattern = head + upper + "*" + lower + "+" + tail + head + upper + "+" + lower + "*" +
                              tail + R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  const nlohmann::json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  const nlohmann::json split = {
      {"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}};
  const nlohmann::json special = {{"id", vocab.size()}, {"content", "<s>"}, {"single_word", true},
                                  {"lstrip", false},    {"rstrip", false},  {"normalized", true},
                                  {"special", true}};
  const nlohmann::json config = {
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}}},
      {"added_tokens", nlohmann::json::array({special})},
      {"pre_tokenizer",
       {{"type", "Sequence"}, {"pretokenizers", nlohmann::json::array({split, byte_level})}}},
      {"decoder", {{"type", "ByteLevel"}}}};
  auto tokenizer = Tokenizer::parse(config.dump());
  FP4MOE_CHECK(tokenizer.ok(), tokenizer.status().to_string());
  return std::move(*tokenizer);
}

void check_pieces(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  fp4moe::IncrementalDetokenizer detokenizer(tokenizer, true);
  std::string pieces;
  for (int32_t id : ids) pieces += detokenizer.push(id);
  FP4MOE_CHECK(pieces + detokenizer.finish() == tokenizer.decode(ids, true), "pieces and whole differ");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Tokenizer tokenizer = make_tokenizer();
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto ids = tokenizer.encode(text, false);
  FP4MOE_CHECK(ids.ok(), ids.status().to_string());
  std::string valid;
  fp4moe::append_lossy_utf8(text, &valid);
  FP4MOE_CHECK(tokenizer.decode(*ids, false) == valid, "the text does not come back");
  check_pieces(tokenizer, *ids);
  check_pieces(tokenizer, std::vector<int32_t>(data, data + size));
  return 0;
}
