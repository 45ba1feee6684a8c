#include "engine/output/stop_regex.h"

#include <algorithm>
#include <utility>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace fp4moe {
namespace {

// Limits on the PCRE2 steps of one search; a search runs after each new character. A search that looks at all
// text held back takes about one step per byte; one that backtracks exponentially can take any number.
// kMaxSteps take about a millisecond, and all expressions of a request share them.
constexpr size_t kLeastSteps = 2000, kMaxSteps = 20000, kStepsOfByte = 16;
constexpr uint32_t kMaxHeapKib = 4096;

uint32_t step_limit(size_t bytes_held, size_t num_expressions) {
  return static_cast<uint32_t>(
      std::max(kLeastSteps, std::min(kStepsOfByte * bytes_held, kMaxSteps / num_expressions)));
}

template <auto kFree>
struct Free {
  template <class T>
  void operator()(T* p) const {
    kFree(p);
  }
};

std::string pcre_message(int code) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

bool begins_character(char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }

}  // namespace

struct StopPatterns::Code {
  std::string name;  // for error messages
  std::string expression;
  std::unique_ptr<pcre2_code, Free<pcre2_code_free>> code;
};

Result<StopPatterns> StopPatterns::compile(const std::vector<std::string>& expressions) {
  const std::unique_ptr<pcre2_compile_context, Free<pcre2_compile_context_free>> options(
      pcre2_compile_context_create(nullptr));
  pcre2_set_newline(options.get(), PCRE2_NEWLINE_LF);
  StopPatterns patterns;
  for (const std::string& expression : expressions) {
    auto made = std::make_shared<Code>();
    made->name = "stop_regex[" + std::to_string(patterns.codes_.size()) + "]";
    made->expression = expression;
    int error = 0;
    PCRE2_SIZE offset = 0;
    made->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expression.data()), expression.size(),
                                   PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset,
                                   options.get()));
    if (!made->code)
      return invalid_argument(made->name + " does not compile: " + pcre_message(error) + " at byte " +
                              std::to_string(offset));
    uint32_t matches_empty = 0;
    pcre2_pattern_info(made->code.get(), PCRE2_INFO_MATCHEMPTY, &matches_empty);
    if (matches_empty != 0)
      return invalid_argument(made->name + " matches the empty text: the output would end before it begins");
    patterns.codes_.push_back(std::move(made));
  }
  return patterns;
}

StopRegex::StopRegex(StopPatterns patterns) : patterns_(std::move(patterns)) {}

std::string StopRegex::push(std::string_view piece) {
  if (patterns_.codes_.empty()) return std::string(piece);
  const size_t before = certain_;
  for (size_t i = 0; i < piece.size() && !has_matched_ && failure_.ok(); ++i) {
    text_.push_back(piece[i]);
    if (i + 1 == piece.size() || begins_character(piece[i + 1])) look();
  }
  return text_.substr(before, certain_ - before);
}

// Call after text_ has grown by a character. Advances certain_ to the earliest possible start of a match, or
// to the start of the match.
void StopRegex::look() {
  size_t begin = text_.size();
  const std::unique_ptr<pcre2_match_data, Free<pcre2_match_data_free>> data(
      pcre2_match_data_create(1, nullptr));
  const std::unique_ptr<pcre2_match_context, Free<pcre2_match_context_free>> limits(
      pcre2_match_context_create(nullptr));
  const uint32_t max_steps = step_limit(text_.size() - certain_, patterns_.codes_.size());
  pcre2_set_match_limit(limits.get(), max_steps);
  pcre2_set_depth_limit(limits.get(), max_steps);
  pcre2_set_heap_limit(limits.get(), kMaxHeapKib);
  for (const auto& code : patterns_.codes_) {
    const int rc = pcre2_match(code->code.get(), reinterpret_cast<PCRE2_SPTR>(text_.data()), text_.size(),
                               certain_, PCRE2_NO_UTF_CHECK | PCRE2_PARTIAL_SOFT, data.get(), limits.get());
    if (rc == PCRE2_ERROR_NOMATCH) continue;
    if (rc < 0 && rc != PCRE2_ERROR_PARTIAL) {
      failure_ = invalid_argument(code->name + ", with " + std::to_string(text_.size() - certain_) +
                                  " bytes of the output held back: " + pcre_message(rc) +
                                  " (limit: " + std::to_string(max_steps) + " steps)");
      return;
    }
    const size_t found = std::clamp(pcre2_get_ovector_pointer(data.get())[0], certain_, text_.size());
    if (rc >= 0 && !has_matched_) begin = text_.size();  // an earlier partial match would complete too late
    if (rc >= 0 && (!has_matched_ || found < begin)) expression_ = code->expression;
    if (rc >= 0 || !has_matched_) begin = std::min(begin, found);
    has_matched_ |= rc >= 0;
  }
  certain_ = begin;
  if (has_matched_) matched_ = text_.substr(begin);
}

void StopRegex::pass(std::string_view text) {
  if (patterns_.codes_.empty()) return;
  text_ += text;
  certain_ = text_.size();
}

std::string StopRegex::finish() {
  if (has_matched_) return {};
  return text_.substr(std::exchange(certain_, text_.size()));
}

}  // namespace fp4moe
