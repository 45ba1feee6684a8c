#include "engine/output/output_text.h"

#include <algorithm>
#include <utility>

namespace fp4moe {

StopMatcher::StopMatcher(const std::vector<std::string>& stops) {
  for (const std::string& text : stops) {
    Pattern pattern{text, std::vector<size_t>(text.size(), 0), 0};
    for (size_t n = 1, border = 0; n < text.size(); ++n) {
      while (border > 0 && text[border] != text[n]) border = pattern.fallback[border - 1];
      if (text[border] == text[n]) ++border;
      pattern.fallback[n] = border;
    }
    patterns_.push_back(std::move(pattern));
  }
}

void StopMatcher::Pattern::advance(char c) {
  while (num_matched > 0 && text[num_matched] != c) num_matched = fallback[num_matched - 1];
  if (text[num_matched] == c) ++num_matched;
}

std::string StopMatcher::push(std::string_view piece) {
  if (!matched_.empty()) return {};
  for (const char c : piece) {
    held_.push_back(c);
    for (Pattern& pattern : patterns_) {
      pattern.advance(c);
      if (pattern.num_matched == pattern.text.size() && pattern.text.size() > matched_.size())
        matched_ = pattern.text;
    }
    if (!matched_.empty()) {
      held_.resize(held_.size() - matched_.size());
      return std::exchange(held_, {});
    }
  }
  size_t num_held = 0;
  for (const Pattern& pattern : patterns_) num_held = std::max(num_held, pattern.num_matched);
  std::string certain = held_.substr(0, held_.size() - num_held);
  held_.erase(0, certain.size());
  return certain;
}

std::string StopMatcher::finish() { return std::exchange(held_, {}); }

std::string OutputText::push(int32_t token_id, bool may_stop) {
  std::string text = detokenizer_.push(token_id);
  if (may_stop) return stop_regex_.push(stop_matcher_.push(text));
  stop_regex_.pass(text);
  return text;
}

std::string OutputText::finish() {
  std::string rest = stop_matcher_.push(detokenizer_.finish());
  rest = stop_regex_.push(rest + stop_matcher_.finish());
  return rest + stop_regex_.finish();
}

}  // namespace fp4moe
