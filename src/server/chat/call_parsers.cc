#include <algorithm>
#include <utility>

#include "server/chat/call_scanner.h"
#include "server/chat/output_parser.h"

namespace fp4moe {

namespace {

constexpr std::string_view kCallSpace = " \t\r\n";
using Kind = OutputPart::Kind;

// The content around calls; white space before and after a call is dropped.
class ContentBesideCalls {
 public:
  void push(std::string_view text, OutputParts& parts) {
    if (skips_space_) text.remove_prefix(std::min(text.find_first_not_of(kCallSpace), text.size()));
    if (text.empty()) return;
    skips_space_ = false;
    held_ += text;
    const size_t end = held_.find_last_not_of(kCallSpace);
    if (end == std::string::npos) return;
    parts.push_back({Kind::kContent, held_.substr(0, end + 1)});
    held_.erase(0, end + 1);
  }
  void begin_call() {
    held_.clear();
    skips_space_ = true;
  }
  void finish(OutputParts& parts) {
    if (!held_.empty()) parts.push_back({Kind::kContent, std::exchange(held_, {})});
  }

 private:
  std::string held_;  // white space
  bool skips_space_ = false;
};

class HermesParser final : public OutputParser {
 public:
  void push(std::string_view text, OutputParts& parts) override {
    held_ += text;
    while (in_call_ ? take_call(parts) : take_content(parts)) {
    }
  }

  void finish(OutputParts& parts) override {
    if (in_call_) {
      scanner_.push(held_, parts);
      give_up_call("", parts);
    } else {
      content_.push(held_, parts);
    }
    held_.clear();
    content_.finish(parts);
  }

 private:
  static constexpr std::string_view kBegin = "<tool_call>", kEnd = "</tool_call>";

  // Each returns whether there may be more to parse.
  bool take_content(OutputParts& parts) {
    const FoundMarker found = find_marker(held_, {kBegin});
    content_.push(std::string_view(held_).substr(0, found.at), parts);
    held_.erase(0, found.at);
    if (found.marker < 0) return false;
    held_.erase(0, kBegin.size());
    content_.begin_call();
    scanner_ = {};
    return in_call_ = true;
  }

  bool take_call(OutputParts& parts) {
    const FoundMarker found = find_marker(held_, {kEnd});
    scanner_.push(std::string_view(held_).substr(0, found.at), parts);
    held_.erase(0, found.at);
    if (found.marker < 0) return false;
    if (scanner_.is_inside_string()) {  // the marker's text inside a JSON string
      scanner_.push(kEnd.substr(0, 1), parts);
      held_.erase(0, 1);
      return true;
    }
    held_.erase(0, kEnd.size());
    give_up_call(kEnd, parts);
    in_call_ = false;
    return true;
  }

  // Text that did not parse as a call is content.
  void give_up_call(std::string_view end, OutputParts& parts) {
    if (scanner_.has_begun()) return;
    content_.push(std::string(kBegin) + scanner_.raw() + std::string(end), parts);
  }

  bool in_call_ = false;
  std::string held_;
  ContentBesideCalls content_;
  CallScanner scanner_;
};

// Arguments without the ```json fence and the white space around them.
class FencedArguments {
 public:
  std::string push(std::string_view text) {
    if (!has_begun_) {
      const size_t first = text.find('{');
      if (first == std::string_view::npos) return {};
      text.remove_prefix(first);
      has_begun_ = true;
    }
    held_ += text;
    const size_t end = held_.find_last_not_of(" \t\r\n`");
    std::string certain = held_.substr(0, end == std::string::npos ? 0 : end + 1);
    held_.erase(0, certain.size());
    return certain;
  }
  bool has_begun() const { return has_begun_; }

 private:
  bool has_begun_ = false;
  std::string held_;
};

// V3 and R1: CALL_BEGIN function SEPARATOR name \n ```json \n arguments \n ``` CALL_END;
// V3.1:      CALL_BEGIN name SEPARATOR arguments CALL_END.
class DeepSeekParser final : public OutputParser {
 public:
  void push(std::string_view text, OutputParts& parts) override {
    held_ += text;
    while (take(parts)) {
    }
  }

  void finish(OutputParts& parts) override {
    if (state_ == State::kContent) content_.push(held_, parts);
    if (state_ == State::kArguments) put_arguments(held_, parts);
    held_.clear();
    content_.finish(parts);
  }

 private:
  enum class State { kContent, kBetween, kHead, kName, kArguments };

  // Moves the text up to the next of `markers` to `text` and returns the marker's index; -1: none found, and
  // `text` is the part that cannot belong to a marker.
  int next(const std::vector<std::string_view>& markers, std::string& text) {
    const FoundMarker found = find_marker(held_, markers);
    text = held_.substr(0, found.at);
    held_.erase(0, found.at);
    if (found.marker >= 0) held_.erase(0, markers[static_cast<size_t>(found.marker)].size());
    return found.marker;
  }

  bool take(OutputParts& parts) {
    std::string text;
    int marker = -1;
    switch (state_) {
      case State::kContent:
        marker = next({kCallsBegin, kCallBegin}, text);
        content_.push(text, parts);
        if (marker >= 0) content_.begin_call();
        if (marker == 0) state_ = State::kBetween;
        if (marker == 1) begin_head();
        break;
      case State::kBetween:
        marker = next({kCallBegin, kCallsEnd}, text);
        if (marker == 0) begin_head();
        if (marker == 1) state_ = State::kContent;
        break;
      case State::kHead:
        marker = next({kCallSeparator, kCallEnd}, text);
        head_ += text;
        if (marker == 0) end_head(parts);
        if (marker == 1) state_ = State::kBetween;
        break;
      case State::kName:
        marker = next({"\n", kCallEnd}, text);
        head_ += text;
        if (marker >= 0) begin_call(parts);
        if (marker == 1) end_call(parts);
        break;
      case State::kArguments:
        marker = next({kCallEnd}, text);
        put_arguments(text, parts);
        if (marker == 0) end_call(parts);
        break;
    }
    return marker >= 0;
  }

  void begin_head() {
    head_.clear();
    state_ = State::kHead;
  }
  void end_head(OutputParts& parts) {
    if (head_ != "function") return begin_call(parts);
    head_.clear();
    state_ = State::kName;
  }
  void begin_call(OutputParts& parts) {
    parts.push_back({Kind::kCall, head_});
    arguments_ = {};
    state_ = State::kArguments;
  }
  void put_arguments(std::string_view text, OutputParts& parts) {
    std::string certain = arguments_.push(text);
    if (!certain.empty()) parts.push_back({Kind::kArguments, std::move(certain)});
  }
  void end_call(OutputParts& parts) {
    if (!arguments_.has_begun()) parts.push_back({Kind::kArguments, "{}"});
    state_ = State::kBetween;
  }

  State state_ = State::kContent;
  std::string held_, head_;
  FencedArguments arguments_;
  ContentBesideCalls content_;
};

class JsonArrayParser final : public OutputParser {
 public:
  void push(std::string_view text, OutputParts& parts) override {
    while (!text.empty()) {
      if (state_ == State::kContent) {
        parts.push_back({Kind::kContent, std::string(text)});
        return;
      }
      if (state_ == State::kCall) {
        text.remove_prefix(scanner_.push(text, parts));
        if (scanner_.is_complete()) state_ = State::kBetween;
        continue;
      }
      if (text.front() == '{') {
        scanner_ = {};
        state_ = State::kCall;
        continue;
      }
      const bool is_array = std::string_view(" \t\r\n[],").find(text.front()) != std::string_view::npos;
      if (state_ == State::kStart && !is_array) {
        state_ = State::kContent;
        continue;
      }
      text.remove_prefix(1);
    }
  }
  void finish(OutputParts& parts) override {
    if (state_ == State::kCall && !scanner_.has_begun()) parts.push_back({Kind::kContent, scanner_.raw()});
  }

 private:
  enum class State { kStart, kCall, kBetween, kContent };
  State state_ = State::kStart;
  CallScanner scanner_;
};

}  // namespace

std::unique_ptr<OutputParser> make_call_parser(CallSyntax syntax) {
  switch (syntax) {
    case CallSyntax::kHermes:
      return std::make_unique<HermesParser>();
    case CallSyntax::kDeepSeek:
      return std::make_unique<DeepSeekParser>();
    case CallSyntax::kJsonArray:
      return std::make_unique<JsonArrayParser>();
    case CallSyntax::kNone:
    case CallSyntax::kHarmony:
      break;
  }
  return make_content_parser();
}

}  // namespace fp4moe
