#include <utility>

#include "server/chat/call_arguments.h"
#include "server/chat/call_text.h"

namespace fp4moe {

namespace {

// <tool_call>NAME and pairs of <arg_key>KEY</arg_key><arg_value>TEXT</arg_value>, then </tool_call>, with any
// white space between the tags.
class ArgumentTagsParser final : public OutputParser {
 public:
  explicit ArgumentTagsParser(std::shared_ptr<const ArgumentTypes> types) : arguments_(std::move(types)) {}

  void push(std::string_view text, OutputParts& parts) override {
    text_.push(text);
    while (take(parts)) {
    }
  }

  void finish(OutputParts& parts) override {
    const std::string rest = text_.take_rest();
    if (state_ == State::kContent) content_.push(rest, parts);
    if (state_ == State::kName) content_.push(std::string(kCallTag) + name_ + rest, parts);
    const std::string_view key = trimmed(key_);
    if (state_ == State::kKey && !key.empty()) arguments_.cut_key(key, parts);
    if (state_ == State::kBeforeValue && !key.empty()) arguments_.cut_after_key(key, parts);
    if (state_ == State::kValue) {
      arguments_.put(rest, parts);
      arguments_.cut_value(parts);
    }
    if (!trimmed(stray_).empty()) content_.push(stray_, parts);
    content_.finish(parts);
  }

 private:
  enum class State { kContent, kName, kBetween, kKey, kBeforeValue, kValue };

  bool take(OutputParts& parts) {
    std::string text;
    switch (state_) {
      case State::kContent: {
        const int marker = text_.next({kCallTag}, text);
        content_.push(text, parts);
        if (marker == 0) begin_name();
        return marker >= 0;
      }
      case State::kName: {
        const int marker = text_.next({kKeyTag, kCallEndTag, kCallTag}, text);
        name_ += text;
        if (marker >= 0) end_name(marker, parts);
        return marker >= 0;
      }
      case State::kBetween: {
        const int marker = text_.next({kKeyTag, kCallEndTag, kCallTag}, text);
        stray_ += text;
        if (marker >= 0) leave_pair(marker, parts);
        return marker >= 0;
      }
      case State::kKey: {
        const int marker = text_.next({kKeyEndTag}, text);
        key_ += text;
        if (marker == 0) state_ = State::kBeforeValue;
        return marker >= 0;
      }
      case State::kBeforeValue:
        return take_gap(parts);
      case State::kValue: {
        const int marker = text_.next({kValueEndTag}, text);
        arguments_.put(text, parts);
        if (marker == 0) end_value(parts);
        return marker >= 0;
      }
    }
    return false;
  }

  void begin_name() {
    name_.clear();
    state_ = State::kName;
  }

  // `marker` as in take(). Text without a name is not a call but content.
  void end_name(int marker, OutputParts& parts) {
    const std::string name(trimmed(name_));
    if (marker == 2 || !is_function_name(name)) {
      const std::string_view tags[] = {kKeyTag, kCallEndTag, ""};
      content_.push(std::string(kCallTag) + name_ + std::string(tags[marker]), parts);
      state_ = State::kContent;
      if (marker == 2) begin_name();
      return;
    }
    content_.begin_call();
    arguments_.begin_call(name, parts);
    leave_pair(marker, parts);
  }

  // After an argument or the name: the next argument, the end of the call, or another call without that end.
  void leave_pair(int marker, OutputParts& parts) {
    if (marker == 0) {
      key_.clear();
      gap_.clear();
      state_ = State::kKey;
      return;
    }
    arguments_.end_call(parts);
    if (!trimmed(stray_).empty()) content_.push(stray_, parts);
    stray_.clear();
    state_ = State::kContent;
    if (marker == 2) begin_name();
  }

  // Between key and value. A key without a value is stray text.
  bool take_gap(OutputParts& parts) {
    std::string text;
    const int marker = text_.next({kKeyTag, kCallEndTag, kCallTag, kValueTag}, text);
    gap_ += text;
    if (marker == 3) {
      if (!trimmed(gap_).empty()) stray_ += gap_;
      arguments_.begin(trimmed(key_), parts);
      state_ = State::kValue;
    } else if (marker >= 0) {
      stray_ += std::string(kKeyTag) + key_ + std::string(kKeyEndTag) + gap_;
      leave_pair(marker, parts);
    }
    return marker >= 0;
  }

  void end_value(OutputParts& parts) {
    arguments_.end(parts);
    state_ = State::kBetween;
  }

  State state_ = State::kContent;
  MarkedText text_;
  ContentBesideCalls content_;
  CallArguments arguments_;
  std::string name_, key_, gap_;  // gap_: between key and value
  std::string stray_;             // text between the parts of a call; content after it
};

}  // namespace

std::unique_ptr<OutputParser> make_argument_tags_parser(std::shared_ptr<const ArgumentTypes> types) {
  return std::make_unique<ArgumentTagsParser>(std::move(types));
}

}  // namespace fp4moe
