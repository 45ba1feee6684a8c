#include <algorithm>
#include <utility>

#include "server/chat/call_scanner.h"
#include "server/chat/call_text.h"
#include "server/chat/output_parser.h"

namespace fp4moe {

namespace {

using Kind = OutputPart::Kind;

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
  static constexpr std::string_view kBegin = kCallTag, kEnd = kCallEndTag;

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

// Arguments without the text around them: white space and, if `fenced`, a ```json fence.
class BareArguments {
 public:
  explicit BareArguments(bool fenced = false) : fenced_(fenced) {}
  std::string push(std::string_view text) {
    if (!has_begun_) {
      const size_t first = fenced_ ? text.find('{') : text.find_first_not_of(kCallSpace);
      if (first == std::string_view::npos) return {};
      text.remove_prefix(first);
      has_begun_ = true;
    }
    held_ += text;
    const size_t end = held_.find_last_not_of(fenced_ ? " \t\r\n`" : kCallSpace);
    std::string certain = held_.substr(0, end == std::string::npos ? 0 : end + 1);
    held_.erase(0, certain.size());
    return certain;
  }
  bool has_begun() const { return has_begun_; }

 private:
  bool fenced_;
  bool has_begun_ = false;
  std::string held_;
};

// DeepSeek V3 and R1: CALL_BEGIN function SEPARATOR name \n ```json \n arguments \n ``` CALL_END;
// DeepSeek V3.1:      CALL_BEGIN name SEPARATOR arguments CALL_END;
// Kimi-K2:            CALL_BEGIN functions.name:index SEPARATOR arguments CALL_END.
class CallTokensParser final : public OutputParser {
 public:
  CallTokensParser(const CallTokens& tokens, bool is_kimi) : tokens_(tokens), is_kimi_(is_kimi) {}

  void push(std::string_view text, OutputParts& parts) override {
    text_.push(text);
    while (take(parts)) {
    }
  }

  void finish(OutputParts& parts) override {
    const std::string rest = text_.take_rest();
    if (state_ == State::kContent) content_.push(rest, parts);
    if (state_ == State::kHead || state_ == State::kName) content_.push(raw_ + rest, parts);
    if (state_ == State::kArguments) put_arguments(rest, parts);
    content_.finish(parts);
  }

 private:
  enum class State { kContent, kBetween, kHead, kName, kArguments };

  bool take(OutputParts& parts) {
    std::string text;
    int marker = -1;
    switch (state_) {
      case State::kContent:
        marker = text_.next({tokens_.section_begin, tokens_.call_begin}, text);
        content_.push(text, parts);
        if (marker >= 0) content_.begin_call();
        if (marker == 0) state_ = State::kBetween;
        if (marker == 1) begin_head();
        break;
      case State::kBetween:
        marker = text_.next({tokens_.call_begin, tokens_.section_end}, text);
        content_.push(text, parts);
        if (marker >= 0) content_.begin_call();
        if (marker == 0) begin_head();
        if (marker == 1) state_ = State::kContent;
        break;
      case State::kHead:
        marker = next_of_head({tokens_.separator, tokens_.call_end}, text);
        head_ += text;
        if (marker == 0) end_head(parts);
        if (marker == 1) give_up_call(parts);
        break;
      case State::kName:
        marker = next_of_head({"\n", tokens_.call_end}, text);
        head_ += text;
        if (marker >= 0) begin_call({Kind::kCall, head_}, parts);
        if (marker == 1) end_call(parts);
        break;
      case State::kArguments:
        marker = text_.next({tokens_.call_end}, text);
        put_arguments(text, parts);
        if (marker == 0) end_call(parts);
        break;
    }
    return marker >= 0;
  }

  void begin_head() {
    head_.clear();
    raw_ = tokens_.call_begin;
    state_ = State::kHead;
  }
  int next_of_head(const std::vector<std::string_view>& markers, std::string& text) {
    const int marker = text_.next(markers, text);
    raw_ += text;
    if (marker >= 0) raw_ += markers[static_cast<size_t>(marker)];
    return marker;
  }
  void end_head(OutputParts& parts) {
    if (is_kimi_) return end_call_id(parts);
    if (head_ != "function") return begin_call({Kind::kCall, head_}, parts);
    head_.clear();
    state_ = State::kName;
  }
  // Reads Kimi's functions.NAME:INDEX, which is the call's id; the model may leave out either part around
  // NAME.
  void end_call_id(OutputParts& parts) {
    const std::string_view id = trimmed(head_);
    std::string_view name = id;
    constexpr std::string_view kPrefix = "functions.";
    if (name.starts_with(kPrefix)) name.remove_prefix(kPrefix.size());
    const size_t colon = name.rfind(':');
    const std::string_view index = colon == name.npos ? std::string_view() : name.substr(colon + 1);
    const bool has_index = !index.empty() && index.find_first_not_of("0123456789") == index.npos;
    if (has_index) name = name.substr(0, colon);
    if (!is_function_name(name)) return give_up_call(parts);
    begin_call({.kind = Kind::kCall, .text = std::string(name), .id = std::string(has_index ? id : "")},
               parts);
  }
  // Text that did not parse as a call is content.
  void give_up_call(OutputParts& parts) {
    content_.push(raw_, parts);
    state_ = State::kBetween;
  }
  void begin_call(OutputPart call, OutputParts& parts) {
    if (call.text.empty()) return give_up_call(parts);
    parts.push_back(std::move(call));
    arguments_ = BareArguments(/*fenced=*/!is_kimi_);
    state_ = State::kArguments;
  }
  void put_arguments(std::string_view text, OutputParts& parts) {
    std::string certain = arguments_.push(text);
    if (!certain.empty()) parts.push_back({Kind::kArguments, std::move(certain)});
  }
  void end_call(OutputParts& parts) {
    if (state_ != State::kArguments) return;
    if (!arguments_.has_begun()) parts.push_back({Kind::kArguments, "{}"});
    state_ = State::kBetween;
  }

  const CallTokens& tokens_;
  const bool is_kimi_;
  State state_ = State::kContent;
  MarkedText text_;
  std::string head_, raw_;  // raw_: the call's text up to its arguments
  BareArguments arguments_;
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
    if (state_ != State::kCall) return;
    scanner_.finish(parts);
    if (!scanner_.has_begun()) parts.push_back({Kind::kContent, scanner_.raw()});
  }

 private:
  enum class State { kStart, kCall, kBetween, kContent };
  State state_ = State::kStart;
  CallScanner scanner_;
};

}  // namespace

std::unique_ptr<OutputParser> make_call_parser(CallSyntax syntax,
                                               std::shared_ptr<const ArgumentTypes> types) {
  switch (syntax) {
    case CallSyntax::kHermes:
      return std::make_unique<HermesParser>();
    case CallSyntax::kDeepSeek:
      return std::make_unique<CallTokensParser>(kDeepSeekTokens, /*is_kimi=*/false);
    case CallSyntax::kKimi:
      return std::make_unique<CallTokensParser>(kKimiTokens, /*is_kimi=*/true);
    case CallSyntax::kArgumentTags:
      return make_argument_tags_parser(std::move(types));
    case CallSyntax::kFunctionTags:
      return make_function_tags_parser(std::move(types));
    case CallSyntax::kJsonArray:
      return std::make_unique<JsonArrayParser>();
    case CallSyntax::kNone:
    case CallSyntax::kHarmony:
      break;
  }
  return make_content_parser();
}

}  // namespace fp4moe
