#include <algorithm>
#include <utility>

#include "server/chat/call_arguments.h"
#include "server/chat/call_text.h"

namespace fp4moe {

namespace {

constexpr std::string_view kParameterTagOnLine = "\n<parameter=", kFunctionEndTagOnLine = "\n</function>";

// A value without one line feed at each end.
class ValueLines {
 public:
  std::string push(std::string_view text) {
    if (text.empty()) return {};
    if (std::exchange(is_first_, false) && text.front() == '\n') text.remove_prefix(1);
    if (text.empty()) return {};
    std::string certain = (std::exchange(holds_line_feed_, false) ? "\n" : "") + std::string(text);
    holds_line_feed_ = certain.back() == '\n';
    if (holds_line_feed_) certain.pop_back();
    return certain;
  }

 private:
  bool is_first_ = true, holds_line_feed_ = false;
};

// <tool_call>, <function=NAME>, any number of <parameter=KEY>TEXT</parameter>, </function> and </tool_call>,
// with white space between the tags. A line feed behind <parameter=KEY> and one before </parameter> are not
// part of TEXT. Models leave out tags: a function of the request may begin without <tool_call>, and a call
// may end without </parameter>, </function> or </tool_call>.
class FunctionTagsParser final : public OutputParser {
 public:
  explicit FunctionTagsParser(std::shared_ptr<const ArgumentTypes> types)
      : types_(std::move(types)), arguments_(types_) {}

  void push(std::string_view text, OutputParts& parts) override {
    held_ += text;
    while (take(parts)) {
    }
  }

  void finish(OutputParts& parts) override {
    const std::string rest = std::exchange(held_, {});
    const bool is_cut_end = is_open_ && kCallEndTag.starts_with(rest);
    if (state_ == State::kContent && !is_cut_end) put_content(rest, parts);
    if (state_ == State::kOpened) put_content(opener_ + rest, parts);
    if (state_ == State::kName) put_content(opener_ + name_ + rest, parts);
    if (state_ == State::kKey && !key_.empty()) arguments_.cut_key(key_, parts);
    if (state_ == State::kValue || state_ == State::kNextKey) {
      put_value(state_ == State::kValue ? rest : undecided_ + key_ + rest, parts);
      arguments_.cut_value(parts);
    }
    if (state_ == State::kValueEnd || state_ == State::kFunctionEnd) end_value(parts);
    if (state_ == State::kFunctionEnd) arguments_.end_call(parts);
    put_stray(parts);
    content_.finish(parts);
  }

 private:
  enum class State {
    kContent,
    kOpened,  // behind <tool_call>
    kName,    // behind <function=
    kBetween,
    kKey,  // behind <parameter=
    kValue,
    kValueEnd,     // behind </parameter>, which is part of a string unless another tag follows
    kFunctionEnd,  // as kValueEnd, behind </function> without </parameter>
    kNextKey,      // as kValueEnd, behind <parameter= without </parameter>
  };

  // Each take function returns whether there may be more to parse.
  bool take(OutputParts& parts) {
    switch (state_) {
      case State::kContent:
        return take_content(parts);
      case State::kOpened:
        return take_opened(parts);
      case State::kName:
        return take_name(parts);
      case State::kBetween:
        return take_between(parts);
      case State::kKey:
        return take_key(parts);
      case State::kValue:
        return take_value(parts);
      case State::kValueEnd:
        return take_end({kParameterTag, kFunctionEndTag, kCallEndTag}, parts);
      case State::kFunctionEnd:
        return take_end({kCallEndTag}, parts);
      case State::kNextKey:
        return take_next_key(parts);
    }
    return false;
  }

  // Consumes the text up to the next of `markers` and the marker, whose index it returns, as MarkedText.
  int next(const std::vector<std::string_view>& markers, std::string& text) {
    const FoundMarker found = find_marker(held_, markers);
    text = held_.substr(0, found.at);
    const size_t size = found.marker < 0 ? 0 : markers[static_cast<size_t>(found.marker)].size();
    held_.erase(0, found.at + size);
    return found.marker;
  }

  // Moves held text up to the first byte of `ends` to `text`; false if there is no such byte yet.
  bool take_until(const char* ends, std::string& text) {
    const size_t end = std::min(held_.find_first_of(ends), held_.size());
    text.append(held_, 0, end);
    held_.erase(0, end);
    return !held_.empty();
  }

  // Moves white space to `text`; false if nothing else is held yet.
  bool take_space(std::string& text) {
    const size_t end = std::min(held_.find_first_not_of(kCallSpace), held_.size());
    text.append(held_, 0, end);
    held_.erase(0, end);
    return !held_.empty();
  }

  bool take_content(OutputParts& parts) {
    std::string text;
    const int marker = next({kCallTag, kFunctionTag, kCallEndTag}, text);
    put_content(text, parts);
    if (marker == 0) {
      is_open_ = false;
      opener_ = kCallTag;
      state_ = State::kOpened;
    } else if (marker == 1) {
      begin_name(std::string(kFunctionTag));
    } else if (marker == 2 && !std::exchange(is_open_, false)) {
      put_content(kCallEndTag, parts);
    }
    return marker >= 0;
  }

  bool take_opened(OutputParts& parts) {
    if (!take_space(opener_)) return false;
    if (held_.starts_with(kFunctionTag)) {
      held_.erase(0, kFunctionTag.size());
      begin_name(opener_ + std::string(kFunctionTag));
      return true;
    }
    if (kFunctionTag.starts_with(held_)) return false;
    put_content(opener_, parts);
    state_ = State::kContent;
    return true;
  }

  void begin_name(std::string opener) {
    opener_ = std::move(opener);
    name_.clear();
    state_ = State::kName;
  }

  bool take_name(OutputParts& parts) {
    size_t size = 0;
    while (size < held_.size() && is_function_name({&held_[size], 1})) ++size;
    name_.append(held_, 0, size);
    held_.erase(0, size);
    if (held_.empty()) return false;
    if (held_.front() == '>' && is_call()) {
      held_.erase(0, 1);
      content_.begin_call();
      arguments_.begin_call(name_, parts);
      line_has_text_ = false;
      state_ = State::kBetween;
    } else {
      put_content(opener_ + name_, parts);
      state_ = State::kContent;
    }
    return true;
  }

  // Without <tool_call>, a function must be one of the request's and start a line, unless it follows a call.
  bool is_call() const {
    if (name_.empty()) return false;
    return opener_ != kFunctionTag || is_open_ || (!line_has_text_ && types_->has(name_));
  }

  bool take_between(OutputParts& parts) {
    std::string text;
    const int marker = next({kParameterTag, kFunctionEndTag, kCallEndTag, kCallTag, kFunctionTag}, text);
    stray_ += text;
    if (marker < 0) return false;
    if (marker == 0) {
      key_.clear();
      state_ = State::kKey;
      return true;
    }
    end_call(parts);
    is_open_ = marker == 1 || marker == 4;
    if (marker == 3) {
      opener_ = kCallTag;
      state_ = State::kOpened;
    }
    if (marker == 4) begin_name(std::string(kFunctionTag));
    return true;
  }

  bool take_key(OutputParts& parts) {
    if (!take_until("<>\n", key_)) return false;
    if (held_.front() == '>' && !key_.empty()) {
      held_.erase(0, 1);
      begin_value(parts);
    } else {
      stray_ += std::string(kParameterTag) + key_;
      state_ = State::kBetween;
    }
    return true;
  }

  void begin_value(OutputParts& parts) {
    lines_ = {};
    may_be_text_ = types_->may_be_text(arguments_.function(), key_);
    arguments_.begin(key_, parts);
    state_ = State::kValue;
  }

  bool take_value(OutputParts& parts) {
    static constexpr State kStates[] = {State::kValueEnd, State::kFunctionEnd, State::kNextKey};
    const std::vector<std::string_view> markers = {kParameterEndTag, kFunctionEndTagOnLine,
                                                   kParameterTagOnLine};
    std::string text;
    const int marker = next(markers, text);
    put_value(text, parts);
    if (marker < 0) return false;
    undecided_ = markers[static_cast<size_t>(marker)];
    key_.clear();
    state_ = kStates[marker];
    if (marker == 0 && !may_be_text_) {
      end_value(parts);
      state_ = State::kBetween;
    }
    return true;
  }

  // Behind a tag that ends the value if one of `tags` follows.
  bool take_end(const std::vector<std::string_view>& tags, OutputParts& parts) {
    if (!take_space(undecided_)) return false;
    for (const std::string_view tag : tags) {
      if (held_.starts_with(tag)) {
        end_value(parts);
        if (state_ == State::kFunctionEnd) {
          end_call(parts);
          is_open_ = true;
        } else {
          state_ = State::kBetween;
        }
        return true;
      }
      if (tag.starts_with(held_)) return false;
    }
    resume_value(undecided_, parts);
    return true;
  }

  // Behind a tag that ends the value if it names another parameter of the function.
  bool take_next_key(OutputParts& parts) {
    if (!take_until("<>\n", key_)) return false;
    if (held_.front() == '>' && types_->has(arguments_.function(), key_)) {
      held_.erase(0, 1);
      end_value(parts);
      begin_value(parts);
    } else {
      resume_value(undecided_ + key_, parts);
    }
    return true;
  }

  void put_value(std::string_view text, OutputParts& parts) { arguments_.put(lines_.push(text), parts); }

  void resume_value(std::string_view text, OutputParts& parts) {
    put_value(text, parts);
    state_ = State::kValue;
  }

  void end_value(OutputParts& parts) {
    if (undecided_.starts_with('\n')) put_value("\n", parts);  // the line feed before the tag is not text
    arguments_.end(parts);
  }

  void end_call(OutputParts& parts) {
    arguments_.end_call(parts);
    state_ = State::kContent;
    put_stray(parts);
  }

  void put_stray(OutputParts& parts) {
    put_content(trimmed(stray_), parts);
    stray_.clear();
  }

  void put_content(std::string_view text, OutputParts& parts) {
    const size_t line = text.rfind('\n') + 1;  // 0 without a line feed
    line_has_text_ = (line == 0 && line_has_text_) || !trimmed(text.substr(line)).empty();
    if (!trimmed(text).empty()) is_open_ = false;
    content_.push(text, parts);
  }

  const std::shared_ptr<const ArgumentTypes> types_;
  CallArguments arguments_;
  ContentBesideCalls content_;
  ValueLines lines_;
  State state_ = State::kContent;
  std::string held_;
  std::string opener_;          // the tags before name_, with white space
  std::string name_, key_;      // of the function and the parameter
  std::string undecided_;       // part of the value or the tag that ends it, with white space
  std::string stray_;           // text between the parts of a call; content after it
  bool may_be_text_ = false;    // the value
  bool is_open_ = false;        // behind a call's </function>: white space or another call may follow
  bool line_has_text_ = false;  // the content's current line
};

}  // namespace

std::unique_ptr<OutputParser> make_function_tags_parser(std::shared_ptr<const ArgumentTypes> types) {
  return std::make_unique<FunctionTagsParser>(std::move(types));
}

}  // namespace fp4moe
