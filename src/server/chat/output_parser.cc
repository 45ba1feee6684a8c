#include "server/chat/output_parser.h"

#include <algorithm>
#include <utility>

namespace fp4moe {

namespace {

constexpr std::string_view kSpace = " \t\r\n";

class ContentParser final : public OutputParser {
 public:
  void push(std::string_view text, OutputParts& parts) override {
    if (!text.empty()) parts.push_back({OutputPart::Kind::kContent, std::string(text)});
  }
  void finish(OutputParts&) override {}
};

class ThinkParser final : public OutputParser {
 public:
  ThinkParser(bool inside, std::unique_ptr<OutputParser> rest, std::string_view also_ends)
      : state_(inside ? State::kInside : State::kBefore), rest_(std::move(rest)), ends_({kEnd}) {
    if (!also_ends.empty()) ends_.push_back(also_ends);
  }

  void push(std::string_view text, OutputParts& parts) override {
    if (state_ == State::kAfter) return push_rest(text, parts);
    held_ += text;
    if (state_ == State::kBefore) look_for_begin(parts);
    if (state_ == State::kInside) look_for_end(parts);
  }

  void finish(OutputParts& parts) override {
    if (state_ == State::kInside) {
      add_reasoning(held_.size(), parts);
    } else if (state_ == State::kBefore) {
      rest_->push(std::exchange(held_, {}), parts);
    }
    rest_->finish(parts);
  }

 private:
  static constexpr std::string_view kBegin = "<think>", kEnd = "</think>";
  enum class State { kBefore, kInside, kAfter };

  // Only the first word of a response can open reasoning.
  void look_for_begin(OutputParts& parts) {
    const size_t first = std::min(held_.find_first_not_of(kSpace), held_.size());
    const std::string_view text = std::string_view(held_).substr(first);
    if (text.starts_with(kBegin)) {
      consume(first + kBegin.size());
      state_ = State::kInside;
    } else if (!kBegin.starts_with(text)) {
      state_ = State::kAfter;
      rest_->push(std::exchange(held_, {}), parts);
    }
  }

  void look_for_end(OutputParts& parts) {
    const FoundMarker found = find_marker(held_, ends_);
    add_reasoning(found.at, parts);
    if (found.marker < 0) return;
    if (found.marker == 0) consume(kEnd.size());
    state_ = State::kAfter;
    skips_space_ = true;
    push_rest(std::exchange(held_, {}), parts);
  }

  void push_rest(std::string_view text, OutputParts& parts) {
    if (skips_space_) {
      text.remove_prefix(std::min(text.find_first_not_of(kSpace), text.size()));
      if (text.empty()) return;
      skips_space_ = false;
    }
    rest_->push(text, parts);
  }

  // Consumes the first `size` held bytes as reasoning.
  void add_reasoning(size_t size, OutputParts& parts) {
    std::string certain = reasoning_.push(std::string_view(held_).substr(0, size));
    consume(size);
    const size_t at = num_consumed_ - reasoning_.num_held() - certain.size();
    if (!certain.empty()) parts.push_back({OutputPart::Kind::kReasoning, std::move(certain), at});
  }

  void consume(size_t size) {
    held_.erase(0, size);
    num_consumed_ += size;
  }

  State state_;
  bool skips_space_ = false;
  std::string held_;
  size_t num_consumed_ = 0;  // bytes before held_, while the state is not kAfter
  TrimmedText reasoning_;
  const std::unique_ptr<OutputParser> rest_;
  std::vector<std::string_view> ends_;
};

class ForcedParser final : public OutputParser {
 public:
  explicit ForcedParser(std::unique_ptr<OutputParser> calls) : calls_(std::move(calls)) {}
  void push(std::string_view text, OutputParts& parts) override {
    OutputParts found;
    calls_->push(text, found);
    add(std::move(found), parts);
  }
  void finish(OutputParts& parts) override {
    OutputParts found;
    calls_->finish(found);
    add(std::move(found), parts);
  }

 private:
  static void add(OutputParts found, OutputParts& parts) {
    for (OutputPart& part : found)
      if (part.kind != OutputPart::Kind::kContent) parts.push_back(std::move(part));
  }

  const std::unique_ptr<OutputParser> calls_;
};

}  // namespace

bool is_reported(const OutputPart& part, bool parallel_calls, int64_t& num_calls) {
  if (part.kind == OutputPart::Kind::kCall) ++num_calls;
  const bool is_call = part.kind == OutputPart::Kind::kCall || part.kind == OutputPart::Kind::kArguments;
  return !is_call || parallel_calls || num_calls == 1;
}

FoundMarker find_marker(std::string_view text, const std::vector<std::string_view>& markers) {
  FoundMarker found{text.size(), -1};
  for (size_t m = 0; m < markers.size(); ++m) {
    const size_t at = text.find(markers[m]);
    if (at == std::string_view::npos) continue;
    const bool is_longer = found.marker >= 0 && at == found.at &&
                           markers[m].size() > markers[static_cast<size_t>(found.marker)].size();
    if (at < found.at || is_longer) found = {at, static_cast<int>(m)};
  }
  if (found.marker >= 0) return found;
  for (const std::string_view marker : markers)
    for (size_t length = std::min(marker.size() - 1, text.size()); length > 0; --length)
      if (text.ends_with(marker.substr(0, length))) {
        found.at = std::min(found.at, text.size() - length);
        break;
      }
  return found;
}

std::string TrimmedText::push(std::string_view text) {
  if (is_empty_) text.remove_prefix(std::min(text.find_first_not_of(kSpace), text.size()));
  if (text.empty()) return {};
  is_empty_ = false;
  space_ += text;
  std::string certain = std::exchange(space_, {});
  const size_t end = certain.find_last_not_of(kSpace);
  const size_t size = end == std::string::npos ? 0 : end + 1;
  space_ = certain.substr(size);
  certain.resize(size);
  return certain;
}

std::string TrimmedText::take_space() { return std::exchange(space_, {}); }

std::unique_ptr<OutputParser> make_content_parser() { return std::make_unique<ContentParser>(); }

std::unique_ptr<OutputParser> make_forced_parser(std::unique_ptr<OutputParser> calls) {
  return std::make_unique<ForcedParser>(std::move(calls));
}

std::unique_ptr<OutputParser> make_think_parser(bool inside, std::unique_ptr<OutputParser> rest,
                                                std::string_view also_ends) {
  return std::make_unique<ThinkParser>(inside, std::move(rest), also_ends);
}

}  // namespace fp4moe
