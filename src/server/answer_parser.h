// Splits an answer's text, as it comes, into reasoning, content and tool calls. What the parts of one kind
// are, joined, does not depend on where the text was cut.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace fp4moe {

struct AnswerPart {
  enum class Kind {
    kReasoning,
    kContent,
    kCall,       // a tool call begins; text is the function's name
    kArguments,  // of the call that began last: a piece of its JSON text
  };
  Kind kind = Kind::kContent;
  std::string text;
  bool operator==(const AnswerPart&) const = default;
};
using AnswerParts = std::vector<AnswerPart>;

class AnswerParser {
 public:
  virtual ~AnswerParser() = default;
  // Appends the parts that became certain; a part of a marker is not.
  virtual void push(std::string_view text, AnswerParts& parts) = 0;
  // At the answer's end: what is left. A call that is cut off stays as far as it came; what only looked like
  // one is content.
  virtual void finish(AnswerParts& parts) = 0;
};

// How calls are written.
enum class CallSyntax {
  kNone,       // no calls are looked for
  kHermes,     // <tool_call>{"name": "f", "arguments": {...}}</tool_call> (Qwen, Hermes)
  kDeepSeek,   // DeepSeek's tokens around function, name and arguments
  kHarmony,    // gpt-oss: channels, with the reasoning in one of them
  kJsonArray,  // the whole answer is [{"name": "f", "parameters": {...}}, ...]
};

// All text is content.
std::unique_ptr<AnswerParser> make_content_parser();
// Content and calls, written in any way but kHarmony.
std::unique_ptr<AnswerParser> make_call_parser(CallSyntax syntax);
// <think>reasoning</think>, then what `rest` is made of. `inside`: the prompt has opened it. White space
// around the reasoning is dropped.
std::unique_ptr<AnswerParser> make_think_parser(bool inside, std::unique_ptr<AnswerParser> rest);
// The prompt ends in <|start|>assistant. Special tokens are in the text.
std::unique_ptr<AnswerParser> make_harmony_parser();

// Where markers begin in a text that goes on.
struct FoundMarker {
  size_t at = 0;    // where it begins; without one: how much of the text cannot be a part of one
  int marker = -1;  // the longest of those that begin first; -1: none
};
FoundMarker find_marker(std::string_view text, const std::vector<std::string_view>& markers);

// A text without the white space around it, as it comes.
class TrimmedText {
 public:
  // What became certain.
  std::string push(std::string_view text);
  bool is_empty() const { return is_empty_; }
  // Space that waits for more text; then it is forgotten.
  std::string take_space();

 private:
  bool is_empty_ = true;
  std::string space_;
};

// DeepSeek's markers.
inline constexpr std::string_view kCallsBegin = "<｜tool▁calls▁begin｜>",
                                  kCallBegin = "<｜tool▁call▁begin｜>", kCallSeparator = "<｜tool▁sep｜>",
                                  kCallEnd = "<｜tool▁call▁end｜>", kCallsEnd = "<｜tool▁calls▁end｜>";

}  // namespace fp4moe
