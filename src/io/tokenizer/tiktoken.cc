#include "io/tokenizer/tiktoken.h"

#include <charconv>
#include <map>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/check.h"
#include "base/printable.h"
#include "io/tokenizer/base64.h"

namespace fp4moe {
namespace {

// The longest tokens of known vocabularies have 128 bytes. The work of from_ranks() is quadratic in this.
constexpr size_t kMaxTokenBytes = 1024;
constexpr size_t kShownTextBytes = 60;  // of malformed text, in messages

struct RankedToken {
  std::string bytes;
  int32_t rank;
  size_t line;
};

Status line_error(size_t line, const std::string& what) {
  return data_loss(std::string(kTiktokenFile) + ": line " + std::to_string(line) + " " + what);
}

Result<RankedToken> parse_line(std::string_view text, size_t line) {
  const size_t space = text.find(' ');
  const std::string_view base64 = text.substr(0, space);
  const std::string_view digits = space == text.npos ? std::string_view() : text.substr(space + 1);
  RankedToken token{{}, -1, line};
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), token.rank);
  const bool is_number = error == std::errc() && end == digits.data() + digits.size();
  if (!is_number || token.rank < 0 || token.rank >= kMaxTokenIds)
    return line_error(line, "has the rank '" + printable(digits, kShownTextBytes) +
                                "'; expected a number from 0 to " + std::to_string(kMaxTokenIds - 1));
  std::optional<std::string> bytes = from_base64(base64);
  if (!bytes)
    return line_error(line, "has the token '" + printable(base64, kShownTextBytes) + "'; expected base64");
  if (bytes->empty() || bytes->size() > kMaxTokenBytes)
    return line_error(line, "has a token of " + std::to_string(bytes->size()) + " bytes; legal: 1 to " +
                                std::to_string(kMaxTokenBytes));
  token.bytes = std::move(*bytes);
  return token;
}

Result<std::vector<RankedToken>> parse_lines(std::string_view text) {
  std::vector<RankedToken> tokens;
  for (size_t line = 1; !text.empty(); ++line) {
    const size_t end = text.find('\n');
    const std::string_view content = text.substr(0, end);
    text.remove_prefix(end == text.npos ? text.size() : end + 1);
    if (content.empty()) continue;
    if (tokens.size() == kMaxTokenIds)
      return line_error(line, "is over the limit of " + std::to_string(kMaxTokenIds) + " tokens");
    FP4MOE_ASSIGN_OR_RETURN(RankedToken token, parse_line(content, line));
    tokens.push_back(std::move(token));
  }
  return tokens;
}

// The entry of `decoder` for one id.
Result<AddedToken> parse_named(const JsonCursor& entry, int32_t id) {
  AddedToken token{.id = id};
  FP4MOE_ASSIGN_OR_RETURN(token.content, entry["content"].string());
  FP4MOE_ASSIGN_OR_RETURN(token.special, entry["special"].boolean_or(false));
  if (token.content.empty()) return entry["content"].error("at least one character");
  for (const char* flag : {"lstrip", "rstrip", "single_word"}) {
    FP4MOE_ASSIGN_OR_RETURN(const bool is_set, entry[flag].boolean_or(false));
    if (is_set)
      return unsupported(std::string(kTokenizerConfigFile) + ": " + entry[flag].path() +
                         " is true; supported: false");
  }
  return token;
}

Result<std::map<int32_t, AddedToken>> parse_decoder(const JsonCursor& decoder) {
  if (!decoder.value().is_object()) return decoder.error("an object of ids and tokens");
  std::map<int32_t, AddedToken> named;
  for (const auto& [key, value] : decoder.value().items()) {
    const JsonCursor entry = decoder[key];
    int32_t id = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    if (error != std::errc() || end != key.data() + key.size() || id < 0 || std::to_string(id) != key)
      return entry.error("a token id as its key");
    FP4MOE_ASSIGN_OR_RETURN(AddedToken token, parse_named(entry, id));
    named.emplace(id, std::move(token));
  }
  return named;
}

}  // namespace

const char* const kTiktokenPattern =
    R"([\p{Han}]+)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+)"
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*)"
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

Result<std::vector<std::string>> parse_tiktoken_ranks(std::string_view text) {
  FP4MOE_ASSIGN_OR_RETURN(std::vector<RankedToken> tokens, parse_lines(text));
  if (tokens.empty()) return data_loss(std::string(kTiktokenFile) + ": has no tokens");
  std::vector<std::string> by_rank(tokens.size());
  std::vector<size_t> line_of_rank(tokens.size(), 0);
  std::unordered_map<std::string, size_t> line_of_token;
  for (RankedToken& token : tokens) {
    const auto rank = static_cast<size_t>(token.rank);
    if (rank >= tokens.size())
      return line_error(token.line, "has the rank " + std::to_string(rank) + ", but there are only " +
                                        std::to_string(tokens.size()) + " tokens");
    if (line_of_rank[rank] != 0)
      return line_error(token.line, "has the rank " + std::to_string(rank) + ", as line " +
                                        std::to_string(line_of_rank[rank]) + " has");
    const auto [other, is_new] = line_of_token.emplace(token.bytes, token.line);
    if (!is_new) return line_error(token.line, "has the same token as line " + std::to_string(other->second));
    line_of_rank[rank] = token.line;
    by_rank[rank] = std::move(token.bytes);
  }
  return by_rank;
}

Result<std::vector<AddedToken>> parse_tiktoken_specials(const JsonCursor& config, size_t num_ranks) {
  FP4MOE_ASSIGN_OR_RETURN(const std::string_view tokenizer_class, config["tokenizer_class"].string());
  if (tokenizer_class != "TikTokenTokenizer")
    return unsupported(std::string(kTokenizerConfigFile) + ": tokenizer_class is " +
                       std::string(tokenizer_class) + "; supported with " + kTiktokenFile +
                       ": TikTokenTokenizer");
  const JsonCursor decoder = config["added_tokens_decoder"];
  FP4MOE_ASSIGN_OR_RETURN(auto named, parse_decoder(decoder));
  const auto first = static_cast<int32_t>(num_ranks);
  const auto out_of_place = [&](int32_t id, const std::string& expected) {
    return decoder[std::to_string(id)].error(expected + ", because " + kTiktokenFile + " has " +
                                             std::to_string(first) + " tokens");
  };
  if (named.empty() || named.begin()->first != first)
    return named.empty() ? decoder.error("special tokens")
                         : out_of_place(named.begin()->first, "the first id to be " + std::to_string(first));
  if (const int32_t last = named.rbegin()->first; last >= first + kNumTiktokenSpecials)
    return out_of_place(last, "an id below " + std::to_string(first + kNumTiktokenSpecials));
  std::vector<AddedToken> tokens;
  std::unordered_set<std::string> seen;
  for (int32_t id = first; id < first + kNumTiktokenSpecials; ++id) {
    const auto found = named.find(id);
    AddedToken token = found != named.end() ? found->second : AddedToken{.id = id, .special = true};
    if (found == named.end()) token.content = "<|reserved_token_" + std::to_string(id) + "|>";
    if (!seen.insert(token.content).second)
      return decoder[std::to_string(id)]["content"].error("content that no other special token has");
    token.pattern = token.content;
    tokens.push_back(std::move(token));
  }
  return tokens;
}

}  // namespace fp4moe
