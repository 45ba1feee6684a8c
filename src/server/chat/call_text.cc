#include "server/chat/call_text.h"

#include <algorithm>
#include <cctype>
#include <utility>

namespace fp4moe {

std::string_view trimmed(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(kCallSpace), text.size()));
  const size_t end = text.find_last_not_of(kCallSpace);
  return text.substr(0, end == std::string_view::npos ? 0 : end + 1);
}

bool is_function_name(std::string_view name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return c == '_' || c == '-' || c == '.' || (c < 128 && std::isalnum(c) != 0);
  });
}

void ContentBesideCalls::push(std::string_view text, OutputParts& parts) {
  if (skips_space_) text.remove_prefix(std::min(text.find_first_not_of(kCallSpace), text.size()));
  if (text.empty()) return;
  skips_space_ = false;
  held_ += text;
  const size_t end = held_.find_last_not_of(kCallSpace);
  if (end == std::string::npos) return;
  parts.push_back({OutputPart::Kind::kContent, held_.substr(0, end + 1)});
  held_.erase(0, end + 1);
}

void ContentBesideCalls::begin_call() {
  held_.clear();
  skips_space_ = true;
}

void ContentBesideCalls::finish(OutputParts& parts) {
  if (!held_.empty()) parts.push_back({OutputPart::Kind::kContent, std::exchange(held_, {})});
}

int MarkedText::next(const std::vector<std::string_view>& markers, std::string& text) {
  const FoundMarker found = find_marker(held_, markers);
  text = held_.substr(0, found.at);
  held_.erase(0, found.at);
  if (found.marker >= 0) held_.erase(0, markers[static_cast<size_t>(found.marker)].size());
  return found.marker;
}

std::string MarkedText::take_rest() { return std::exchange(held_, {}); }

}  // namespace fp4moe
