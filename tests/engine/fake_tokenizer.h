// A byte-level tokenizer for tests: an id for each byte, then the named tokens, then ids without a token.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "io/tokenizer/tokenizer.h"

namespace fp4moe {

constexpr int32_t kEosId = 256;        // "<eos>", special
constexpr int32_t kFirstWordId = 257;  // the n-th of `words` has id kFirstWordId + n

// UTF-8 of the character that represents `byte` in a byte-level vocabulary (GPT-2's table): printable ASCII
// and Latin-1 represent themselves, the rest are numbered from U+0100.
inline std::string byte_level_char(int byte) {
  int codepoint = 0;
  for (int b = 0, next = 0x100; b <= byte; ++b) {
    const bool is_printable = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
    codepoint = is_printable ? b : next++;
  }
  if (codepoint < 0x80) return std::string(1, static_cast<char>(codepoint));
  return {static_cast<char>(0xc0 | codepoint >> 6), static_cast<char>(0x80 | (codepoint & 0x3f))};
}

inline Tokenizer fake_tokenizer(const std::vector<std::string>& words = {}) {
  std::string vocab;
  const auto add = [&](const std::string& token, int id) {
    const std::string escape = token == "\"" || token == "\\" ? "\\" : "";
    vocab += (vocab.empty() ? "\"" : ",\"") + escape + token + "\":" + std::to_string(id);
  };
  for (int byte = 0; byte < 256; ++byte) add(byte_level_char(byte), byte);
  add("<eos>", kEosId);
  for (size_t i = 0; i < words.size(); ++i) add(words[i], kFirstWordId + static_cast<int>(i));
  const std::string byte_level =
      R"({"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true})";
  Result<Tokenizer> tokenizer = Tokenizer::parse(
      R"({"version":"1.0","truncation":null,"padding":null,"normalizer":null,"post_processor":null,)"
      R"("added_tokens":[{"id":256,"content":"<eos>","single_word":false,"lstrip":false,"rstrip":false,)"
      R"("normalized":false,"special":true}],"pre_tokenizer":)" +
      byte_level + R"(,"decoder":)" + byte_level +
      R"(,"model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,)"
      R"("end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,"vocab":{)" +
      vocab + R"(},"merges":[]}})");
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().to_string();
  return std::move(*tokenizer);
}

inline std::vector<int32_t> byte_ids(std::string_view text) {
  std::vector<int32_t> ids;
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

}  // namespace fp4moe
