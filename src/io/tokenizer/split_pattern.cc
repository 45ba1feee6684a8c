#include "io/tokenizer/split_pattern.h"

#include "base/check.h"
#include "io/tokenizer/unicode_text.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace fp4moe {
namespace {

// Limits on the steps of one match, and on its memory without JIT. Backtracking over a run of n characters
// takes about n steps, so the limits allow any text that encode() accepts, but stop runaway backtracking.
constexpr uint32_t kMaxMatchSteps = 1 << 26;
constexpr uint32_t kMaxHeapKib = 64 * 1024;

template <auto kFree>
struct Free {
  template <class T>
  void operator()(T* p) const {
    kFree(p);
  }
};
using MatchData = std::unique_ptr<pcre2_match_data, Free<pcre2_match_data_free>>;
using MatchContext = std::unique_ptr<pcre2_match_context, Free<pcre2_match_context_free>>;
using CompileContext = std::unique_ptr<pcre2_compile_context, Free<pcre2_compile_context_free>>;

std::string pcre_message(int code) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

}  // namespace

struct SplitPattern::Code {
  std::unique_ptr<pcre2_code, Free<pcre2_code_free>> code;
  MatchContext context;
};

SplitPattern::SplitPattern(std::unique_ptr<Code> code) : code_(std::move(code)) {}
SplitPattern::SplitPattern(SplitPattern&&) noexcept = default;
SplitPattern& SplitPattern::operator=(SplitPattern&&) noexcept = default;
SplitPattern::~SplitPattern() = default;

Result<SplitPattern> SplitPattern::compile(const std::string& pcre_pattern) {
  const CompileContext compile_context(pcre2_compile_context_create(nullptr));
  pcre2_set_newline(compile_context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  auto result = std::make_unique<Code>();
  result->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pcre_pattern.data()), pcre_pattern.size(),
                                   PCRE2_UTF | PCRE2_NEVER_BACKSLASH_C, &error, &offset,
                                   compile_context.get()));
  if (!result->code)
    return invalid_argument("regular expression does not compile: " + pcre_message(error) + " at byte " +
                            std::to_string(offset) + " of " + pcre_pattern);
  // Without JIT (if the system forbids it), matching is slower, but its results are the same.
  pcre2_jit_compile(result->code.get(), PCRE2_JIT_COMPLETE);
  result->context.reset(pcre2_match_context_create(nullptr));
  pcre2_set_match_limit(result->context.get(), kMaxMatchSteps);
  pcre2_set_depth_limit(result->context.get(), kMaxMatchSteps);
  pcre2_set_heap_limit(result->context.get(), kMaxHeapKib);
  return SplitPattern(std::move(result));
}

Status SplitPattern::find_all(std::string_view text, std::vector<Range>* matches) const {
  matches->clear();
  return for_each(text, [&](Range match) {
    matches->push_back(match);
    return Status();
  });
}

Status SplitPattern::for_each(std::string_view text, const std::function<Status(Range)>& visit) const {
  const MatchData data(pcre2_match_data_create(1, nullptr));
  const auto subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  size_t start = 0;
  int64_t last_end = -1;  // end of the previous match
  while (start <= text.size()) {
    int rc = PCRE2_ERROR_JIT_STACKLIMIT;
    for (uint32_t options : {PCRE2_NO_UTF_CHECK, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT})
      if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
        rc = pcre2_match(code_->code.get(), subject, text.size(), start, options, data.get(),
                         code_->context.get());
    if (rc == PCRE2_ERROR_NOMATCH) break;
    if (rc < 0)
      return does_not_fit("splitting " + std::to_string(text.size()) + " bytes of text failed at byte " +
                          std::to_string(start) + ": " + pcre_message(rc));
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(data.get());
    const auto [begin, end] = Range{static_cast<uint32_t>(range[0]), static_cast<uint32_t>(range[1])};
    if (begin == end && last_end == end) {
      // Advance one character, like Hugging Face's Oniguruma binding.
      start += start < text.size() ? utf8_step(text.substr(start)).num_bytes : 1;
      continue;
    }
    FP4MOE_RETURN_IF_ERROR(visit({begin, end}));
    last_end = end;
    start = end;
  }
  return {};
}

}  // namespace fp4moe
