#include "io/tokenizer/added_tokens.h"

#include <algorithm>
#include <unordered_set>

#include "base/check.h"
#include "io/tokenizer/unicode_text.h"

namespace fp4moe {
namespace {

bool starts_with_word(std::string_view text) {
  return !text.empty() && is_word_character(decode_utf8(text, utf8_step(text).num_bytes));
}

bool ends_with_word(std::string_view text) {
  if (text.empty()) return false;
  const size_t begin = last_character(text);
  return is_word_character(decode_utf8(text.substr(begin), static_cast<uint32_t>(text.size() - begin)));
}

Result<AddedToken> parse_added_token(const JsonCursor& entry, bool normalize) {
  AddedToken token;
  FP4MOE_ASSIGN_OR_RETURN(token.id, entry["id"].token_id());
  FP4MOE_ASSIGN_OR_RETURN(token.content, entry["content"].string());
  FP4MOE_ASSIGN_OR_RETURN(token.special, entry["special"].boolean());
  FP4MOE_ASSIGN_OR_RETURN(token.normalized, entry["normalized"].boolean());
  FP4MOE_ASSIGN_OR_RETURN(token.single_word, entry["single_word"].boolean());
  FP4MOE_ASSIGN_OR_RETURN(token.lstrip, entry["lstrip"].boolean());
  FP4MOE_ASSIGN_OR_RETURN(token.rstrip, entry["rstrip"].boolean());
  if (token.content.empty()) return entry["content"].error("at least one character");
  token.pattern = token.normalized && normalize ? normalize_nfc(token.content) : token.content;
  return token;
}

}  // namespace

AddedTokenMatcher::AddedTokenMatcher(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::sort(tokens_.begin(), tokens_.end(),
            [](const AddedToken& a, const AddedToken& b) { return a.pattern < b.pattern; });
  first_of_byte_.assign(257, 0);
  for (const AddedToken& token : tokens_) ++first_of_byte_[static_cast<uint8_t>(token.pattern[0]) + 1];
  for (size_t i = 1; i < first_of_byte_.size(); ++i) first_of_byte_[i] += first_of_byte_[i - 1];
}

const AddedToken* AddedTokenMatcher::longest_prefix(std::string_view text) const {
  const auto byte_at = [](std::string_view s, size_t i) { return static_cast<uint8_t>(s[i]); };
  const AddedToken* longest = nullptr;
  auto begin = tokens_.begin() + first_of_byte_[byte_at(text, 0)];
  auto end = tokens_.begin() + first_of_byte_[byte_at(text, 0) + 1];
  // [begin, end) are the tokens that match the text's first `length` bytes; a token of exactly that length
  // comes first.
  for (size_t length = 1; begin != end; ++length) {
    if (begin->pattern.size() == length) longest = &*begin++;
    if (length == text.size()) break;
    const uint8_t next = byte_at(text, length);
    begin = std::partition_point(begin, end,
                                 [&](const AddedToken& t) { return byte_at(t.pattern, length) < next; });
    end = std::partition_point(begin, end,
                               [&](const AddedToken& t) { return byte_at(t.pattern, length) == next; });
  }
  return longest;
}

void AddedTokenMatcher::split(std::string_view text, std::vector<Segment>* segments) const {
  size_t done = 0;       // end of the text already in segments; `begin` is clamped to it
  size_t space_end = 0;  // end of the white space that was skipped last
  for (size_t i = 0; !tokens_.empty() && i < text.size();) {
    const AddedToken* token = longest_prefix(text.substr(i));
    if (!token) {
      ++i;
      continue;
    }
    size_t begin = i, end = i + token->pattern.size();
    i = end;
    if (token->single_word && (ends_with_word(text.substr(0, begin)) || starts_with_word(text.substr(end))))
      continue;
    if (token->lstrip)
      begin = begin < done ? done : begin - trailing_white_space(text.substr(done, begin - done));
    if (token->rstrip) {
      if (end >= space_end) space_end = end + leading_white_space(text.substr(end));
      end = space_end;
    }
    if (done < begin) segments->push_back({text.substr(done, begin - done), -1});
    segments->push_back({{}, token->id});
    done = end;
  }
  if (done < text.size()) segments->push_back({text.substr(done), -1});
}

Result<std::vector<AddedToken>> parse_added_tokens(const JsonCursor& added_tokens,
                                                   const BpeModel::Vocab& vocab, bool normalize) {
  std::vector<AddedToken> tokens;
  if (added_tokens.is_null()) return tokens;
  FP4MOE_ASSIGN_OR_RETURN(const size_t count, added_tokens.array_size());
  std::unordered_set<std::string> seen;
  std::unordered_set<int32_t> vocab_ids;
  for (const auto& entry : vocab) vocab_ids.insert(entry.second);
  auto next_id = static_cast<int32_t>(vocab.size());
  for (size_t i = 0; i < count; ++i) {
    const JsonCursor entry = added_tokens.element(i);
    FP4MOE_ASSIGN_OR_RETURN(AddedToken token, parse_added_token(entry, normalize));
    const auto known = vocab.find(token.content);
    const int32_t expected = known != vocab.end() ? known->second : next_id++;
    if (token.id != expected)
      return entry["id"].error(std::to_string(expected) +
                               (known != vocab.end() ? ", its id in the vocabulary" : ", the next free id"));
    if (known == vocab.end() && vocab_ids.count(token.id) > 0)
      return entry["id"].error("an id that the vocabulary does not use");
    // Keys with "n" or "r": each pattern may occur once per pass (normalized or raw); "c": each content once.
    if (!seen.insert((token.normalized ? "n" : "r") + token.pattern).second ||
        !seen.insert("c" + token.content).second)
      return entry["content"].error("content that no other added token has");
    tokens.push_back(std::move(token));
  }
  return tokens;
}

}  // namespace fp4moe
