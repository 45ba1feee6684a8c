// Splits streamed output text into reasoning, content and tool calls. The concatenated text of each kind does
// not depend on how the stream was cut into pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace fp4moe {

struct OutputPart {
  enum class Kind {
    kReasoning,
    kContent,
    kCall,       // a tool call begins; text is the function's name
    kArguments,  // a piece of the JSON arguments of the latest call
  };
  Kind kind = Kind::kContent;
  std::string text;
  size_t at = 0;        // kReasoning: the offset in the parser's whole input at which the text starts
  std::string id = {};  // kCall: the id that the model gave the call; empty if it gave none
  bool operator==(const OutputPart& other) const {
    return kind == other.kind && text == other.text && id == other.id;
  }
};
using OutputParts = std::vector<OutputPart>;

// Counts calls in `num_calls`. Returns whether the part is reported: without `parallel_calls` only the first
// call is.
bool is_reported(const OutputPart& part, bool parallel_calls, int64_t& num_calls);

class OutputParser {
 public:
  virtual ~OutputParser() = default;
  // Appends the parts that are certain; holds back text that may be the beginning of a marker.
  virtual void push(std::string_view text, OutputParts& parts) = 0;
  // Call at the end of the output: appends the held-back text. The reported part of a truncated call remains;
  // text that only looked like a call becomes content.
  virtual void finish(OutputParts& parts) = 0;
};

// The syntax of tool calls.
enum class CallSyntax {
  kNone,          // calls are not parsed
  kHermes,        // <tool_call>{"name": "f", "arguments": {...}}</tool_call> (Qwen, Hermes)
  kDeepSeek,      // DeepSeek's tokens around function, name and arguments
  kHarmony,       // gpt-oss: channels, with the reasoning in one of them
  kJsonArray,     // the whole output is [{"name": "f", "parameters": {...}}, ...]
  kKimi,          // Kimi-K2's tokens around functions.f:0 and arguments
  kArgumentTags,  // <tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call> (GLM)
  kFunctionTags,  // <tool_call><function=f><parameter=k>v</parameter></function></tool_call> (Qwen3.5)
};

// All text is content.
std::unique_ptr<OutputParser> make_content_parser();
// Content and calls in any syntax except kHarmony. kArgumentTags and kFunctionTags need `types`.
class ArgumentTypes;
std::unique_ptr<OutputParser> make_call_parser(CallSyntax syntax,
                                               std::shared_ptr<const ArgumentTypes> types = nullptr);
std::unique_ptr<OutputParser> make_argument_tags_parser(std::shared_ptr<const ArgumentTypes> types);
std::unique_ptr<OutputParser> make_function_tags_parser(std::shared_ptr<const ArgumentTypes> types);
// Parses <think>reasoning</think>, followed by text for `rest`. `inside`: the prompt already ends in <think>.
// White space around the reasoning is dropped. `also_ends`, if not empty, ends reasoning without </think> and
// is passed on to `rest`.
std::unique_ptr<OutputParser> make_think_parser(bool inside, std::unique_ptr<OutputParser> rest,
                                                std::string_view also_ends = {});
// Expects that the prompt ends in <|start|>assistant and that the text includes special tokens.
std::unique_ptr<OutputParser> make_harmony_parser();

// Drops the content of `calls`, so that the beginning of a forced call that was cut off is not returned as
// text.
std::unique_ptr<OutputParser> make_forced_parser(std::unique_ptr<OutputParser> calls);

// The first marker in a text that may continue.
struct FoundMarker {
  size_t at = 0;    // the marker's offset, or the length of the prefix that cannot be part of a marker
  int marker = -1;  // the index of the longest marker at that offset; -1: none
};
FoundMarker find_marker(std::string_view text, const std::vector<std::string_view>& markers);

// Incrementally trims white space around a text.
class TrimmedText {
 public:
  // Returns the text that is now known not to be trailing space.
  std::string push(std::string_view text);
  bool is_empty() const { return is_empty_; }
  size_t num_held() const { return space_.size(); }  // bytes of white space held back
  // Returns and forgets the white space that was held back.
  std::string take_space();

 private:
  bool is_empty_ = true;
  std::string space_;
};

// The tokens around calls: SECTION_BEGIN (CALL_BEGIN head SEPARATOR arguments CALL_END)... SECTION_END.
struct CallTokens {
  std::string_view section_begin, call_begin, separator, call_end, section_end;
};
inline constexpr CallTokens kDeepSeekTokens = {"<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
                                               "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
                                               "<｜tool▁calls▁end｜>"};
inline constexpr CallTokens kKimiTokens = {"<|tool_calls_section_begin|>", "<|tool_call_begin|>",
                                           "<|tool_call_argument_begin|>", "<|tool_call_end|>",
                                           "<|tool_calls_section_end|>"};

// GLM's tags; the first two are also those of kHermes and kFunctionTags.
inline constexpr std::string_view kCallTag = "<tool_call>", kCallEndTag = "</tool_call>",
                                  kKeyTag = "<arg_key>", kKeyEndTag = "</arg_key>", kValueTag = "<arg_value>",
                                  kValueEndTag = "</arg_value>";
// The other tags of kFunctionTags. A name and '>' follow those that end in '='.
inline constexpr std::string_view kFunctionTag = "<function=", kFunctionEndTag = "</function>",
                                  kParameterTag = "<parameter=", kParameterEndTag = "</parameter>";
// The begin of a call in kFunctionTags, which models also write without </think>.
inline constexpr std::string_view kFunctionCallBegin = "<tool_call>\n<function=";

}  // namespace fp4moe
