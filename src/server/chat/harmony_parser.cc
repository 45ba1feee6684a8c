// gpt-oss's harmony format. A message is a header, <|message|>, text, and <|end|>, <|return|> or <|call|>;
// the next one begins with <|start|>. The prompt ends in <|start|>assistant, so the first header continues
// from there.
//   <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>content<|return|>
//   <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
// Models omit markers and add spurious ones: a message ends where the next begins, and output without any
// marker is content.
#include <algorithm>
#include <utility>

#include "server/chat/output_parser.h"

namespace fp4moe {

namespace {

using Kind = OutputPart::Kind;

const std::vector<std::string_view> kMarkers = {"<|start|>", "<|channel|>", "<|constrain|>", "<|message|>",
                                                "<|end|>",   "<|return|>",  "<|call|>"};
enum Marker { kStart, kChannel, kConstrain, kMessage, kEnd, kReturn, kCallMarker };

bool is_header_space(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

// The first word of a text, delimited by white space.
std::string first_word(std::string_view text) {
  const auto begin = std::find_if_not(text.begin(), text.end(), is_header_space);
  return {begin, std::find_if(begin, text.end(), is_header_space)};
}

class HarmonyParser final : public OutputParser {
 public:
  void push(std::string_view text, OutputParts& parts) override {
    held_ += text;
    for (;;) {
      const FoundMarker found = find_marker(held_, kMarkers);
      take_text(std::string_view(held_).substr(0, found.at), parts);
      consume(found.at);
      if (found.marker < 0) return;
      consume(kMarkers[static_cast<size_t>(found.marker)].size());
      take_marker(static_cast<Marker>(found.marker), parts);
    }
  }

  void finish(OutputParts& parts) override {
    take_text(std::exchange(held_, {}), parts);
    if (state_ == State::kFirst) put(Kind::kContent, header_, parts);
    end_message(parts);
  }

 private:
  enum class State {
    kFirst,    // no marker so far: a header, or output without markers
    kRole,     // after <|start|>
    kChannel,  // after <|channel|>
    kOther,    // the rest of the header, or between messages
    kText,
  };

  void take_text(std::string_view text, OutputParts& parts) {
    if (state_ == State::kText) return put(kind_, text, parts);
    header_ += text;
    if (state_ != State::kFirst || may_be_header()) return;
    begin_message(Kind::kContent);
    put(kind_, std::exchange(header_, {}), parts);
  }

  // Whether header_ can still be the text between "assistant" and the first marker: a recipient.
  bool may_be_header() const {
    constexpr std::string_view kTo = "to=";
    const auto begin = std::find_if_not(header_.begin(), header_.end(), is_header_space);
    const std::string_view rest(begin, header_.end());
    return rest.starts_with(kTo) ? std::none_of(rest.begin(), rest.end(), is_header_space) || rest.size() < 80
                                 : kTo.starts_with(rest);
  }

  void take_marker(Marker marker, OutputParts& parts) {
    switch (marker) {
      case kStart:
      case kChannel:
        if (state_ == State::kText) end_message(parts);
        if (marker == kStart) {
          recipient_.clear();
          channel_.clear();
        } else {
          read_header();
        }
        header_.clear();
        state_ = marker == kStart ? State::kRole : State::kChannel;
        break;
      case kConstrain:
        if (state_ == State::kText) break;  // misplaced: ignored
        read_header();
        header_.clear();
        state_ = State::kOther;
        break;
      case kMessage:
        if (state_ == State::kText) break;
        read_header();
        header_.clear();
        begin_message(recipient_.empty() ? channel_ == "analysis" ? Kind::kReasoning : Kind::kContent
                                         : Kind::kArguments);
        if (kind_ == Kind::kArguments) parts.push_back({Kind::kCall, recipient_});
        break;
      case kEnd:
      case kReturn:
      case kCallMarker:
        if (state_ == State::kFirst) put(Kind::kContent, header_, parts);
        end_message(parts);
        header_.clear();
        recipient_.clear();
        channel_.clear();
        state_ = State::kOther;
        break;
    }
  }

  // Reads the channel and recipient from the header part that just ended.
  void read_header() {
    if (state_ == State::kChannel) channel_ = first_word(header_);
    constexpr std::string_view kTo = "to=", kFunctions = "functions.";
    const size_t to = header_.find(kTo);
    if (to == std::string::npos) return;
    recipient_ = first_word(std::string_view(header_).substr(to + kTo.size()));
    if (recipient_.starts_with(kFunctions)) recipient_.erase(0, kFunctions.size());
  }

  void begin_message(Kind kind) {
    kind_ = kind;
    state_ = State::kText;
    is_empty_ = true;
  }
  void end_message(OutputParts& parts) {
    if (state_ == State::kText && kind_ == Kind::kArguments && is_empty_)
      parts.push_back({Kind::kArguments, "{}"});
  }
  void put(Kind kind, std::string_view text, OutputParts& parts) {
    if (text.empty()) return;
    is_empty_ = false;
    parts.push_back({kind, std::string(text), num_consumed_});
  }
  void consume(size_t size) {
    held_.erase(0, size);
    num_consumed_ += size;
  }

  State state_ = State::kFirst;
  std::string held_, header_, channel_, recipient_;
  size_t num_consumed_ = 0;  // bytes before held_
  Kind kind_ = Kind::kContent;
  bool is_empty_ = true;  // the current message has no text yet
};

}  // namespace

std::unique_ptr<OutputParser> make_harmony_parser() { return std::make_unique<HarmonyParser>(); }

}  // namespace fp4moe
