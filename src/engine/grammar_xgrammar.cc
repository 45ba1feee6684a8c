#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <variant>

#include "engine/grammar.h"

namespace fp4moe {
namespace {

constexpr int kMaxNesting = 256;  // of brackets: xgrammar's parsers recurse
constexpr int kMaxThreads = 4;    // of one compilation

// xgrammar's warnings of the compilation that runs on this thread: each says what it would ignore.
thread_local std::vector<std::string>* warnings = nullptr;

// "Check failed: (condition) is false: what is wrong" without what only xgrammar's authors understand.
std::string without_condition(const std::string& message) {
  constexpr std::string_view kEnd = " is false: ";
  const size_t end = message.find(kEnd);
  return end == std::string::npos ? message : message.substr(end + kEnd.size());
}

Status check_nesting(const std::string& text) {
  int depth = 0;
  for (const char c : text) {
    if (c == '(' || c == '[' || c == '{') ++depth;
    if (c == ')' || c == ']' || c == '}') depth = std::max(0, depth - 1);
    if (depth > kMaxNesting)
      return invalid_argument("it nests deeper than " + std::to_string(kMaxNesting) + " brackets");
  }
  return {};
}

class XgrammarMatcher final : public GrammarMatcher {
 public:
  explicit XgrammarMatcher(xgrammar::GrammarMatcher matcher) : matcher_(std::move(matcher)) {}

  Status fill_allowed(std::span<uint32_t> allowed) override {
    auto size = static_cast<int64_t>(allowed.size());
    DLTensor tensor{.data = allowed.data(),
                    .device = {kDLCPU, 0},
                    .ndim = 1,
                    .dtype = xgrammar::GetBitmaskDLType(),
                    .shape = &size,
                    .strides = nullptr,
                    .byte_offset = 0};
    try {
      matcher_.FillNextTokenBitmask(&tensor);
    } catch (const std::exception& error) {
      return internal_error("the grammar's mask: " + without_condition(error.what()));
    }
    return {};
  }

  Status accept(int32_t id) override {
    try {
      if (matcher_.AcceptToken(id)) return {};
    } catch (const std::exception& error) {
      return internal_error("the grammar at token " + std::to_string(id) + ": " +
                            without_condition(error.what()));
    }
    return internal_error("token " + std::to_string(id) + " is against the grammar");
  }

  bool has_ended() const override { return matcher_.IsTerminated(); }

 private:
  xgrammar::GrammarMatcher matcher_;
};

class XgrammarGrammar final : public Grammar {
 public:
  explicit XgrammarGrammar(xgrammar::CompiledGrammar compiled) : compiled_(std::move(compiled)) {}
  std::unique_ptr<GrammarMatcher> make_matcher() const override {
    const bool has_stop_tokens = !compiled_.GetTokenizerInfo().GetStopTokenIds().empty();
    return std::make_unique<XgrammarMatcher>(
        xgrammar::GrammarMatcher(compiled_, std::nullopt, /*terminate_without_stop_token=*/!has_stop_tokens));
  }
  int64_t num_bytes() const override { return static_cast<int64_t>(compiled_.MemorySizeBytes()); }

 private:
  xgrammar::CompiledGrammar compiled_;
};

class XgrammarCompiler final : public GrammarCompiler {
 public:
  XgrammarCompiler(const Tokenizer& tokenizer, int64_t vocab_size, std::vector<int32_t> eos_token_ids)
      : tokenizer_(tokenizer), vocab_size_(vocab_size), eos_token_ids_(std::move(eos_token_ids)) {}

  Result<std::shared_ptr<const Grammar>> compile(const GrammarSpec& spec) override {
    if (const Status nesting = check_nesting(spec.text); !nesting.ok()) return nesting;
    std::call_once(prepared_, [this] { prepare(); });
    std::vector<std::string> ignored;
    warnings = &ignored;
    Result<std::shared_ptr<const Grammar>> grammar = compile_guarded(spec);
    warnings = nullptr;
    if (grammar.ok() && !ignored.empty()) return invalid_argument(ignored.front());
    return grammar;
  }

 private:
  // Sorting a large vocabulary takes a tenth of a second: the first grammar waits for it, no start does.
  // Special tokens begin with a byte that is in no text: only a tag that names their ids allows them.
  void prepare() {
    std::vector<std::string> texts(static_cast<size_t>(vocab_size_));
    for (int32_t id = 0; id < vocab_size_; ++id)
      texts[static_cast<size_t>(id)] =
          (tokenizer_.is_special(id) ? "\xFF" : "") + std::string(tokenizer_.token_bytes(id));
    const xgrammar::TokenizerInfo info(texts, xgrammar::VocabType::RAW, static_cast<int>(vocab_size_),
                                       eos_token_ids_);
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    compiler_.emplace(info, std::clamp(cores / 2, 1, kMaxThreads), /*cache_enabled=*/false);
  }

  Result<std::shared_ptr<const Grammar>> compile_guarded(const GrammarSpec& spec) {
    try {
      return std::shared_ptr<const Grammar>(std::make_shared<XgrammarGrammar>(compile_kind(spec)));
    } catch (const std::bad_alloc&) {
      return unavailable("no memory for the compiled grammar");
    } catch (const std::exception& error) {
      return invalid_argument(without_condition(error.what()));
    }
  }

  xgrammar::CompiledGrammar compile_kind(const GrammarSpec& spec) {
    switch (spec.kind) {
      case GrammarSpec::Kind::kJsonSchema:
        return compiler_->CompileJSONSchema(spec.text, /*any_whitespace=*/false, /*indent=*/std::nullopt,
                                            std::pair<std::string, std::string>(",", ":"));
      case GrammarSpec::Kind::kRegex:
        return compiler_->CompileRegex(spec.text);
      case GrammarSpec::Kind::kEbnf:
        return compiler_->CompileGrammar(spec.text);
      case GrammarSpec::Kind::kStructuralTag:
        return compiler_->CompileStructuralTag(spec.text);
      case GrammarSpec::Kind::kNone:
        break;
    }
    throw std::invalid_argument("no grammar");
  }

  const Tokenizer& tokenizer_;
  const int64_t vocab_size_;
  const std::vector<int32_t> eos_token_ids_;
  std::once_flag prepared_;
  std::optional<xgrammar::GrammarCompiler> compiler_;
};

}  // namespace

bool has_grammar_backend() { return true; }

std::unique_ptr<GrammarCompiler> make_grammar_compiler(const Tokenizer& tokenizer, int64_t vocab_size,
                                                       std::vector<int32_t> eos_token_ids) {
  return std::make_unique<XgrammarCompiler>(tokenizer, vocab_size, std::move(eos_token_ids));
}

}  // namespace fp4moe

// Where xgrammar's messages go (XGRAMMAR_LOG_CUSTOMIZE, scripts/setup).
namespace xgrammar {

[[noreturn]] void LogFatalImpl(const std::string& file, int lineno, const std::string& message);
void LogMessageImpl(const std::string& file, int lineno, int level, const std::string& message);

void LogFatalImpl(const std::string&, int, const std::string& message) { throw std::runtime_error(message); }

void LogMessageImpl(const std::string&, int, int level, const std::string& message) {
  constexpr int kWarning = 2;
  if (level == kWarning && fp4moe::warnings != nullptr) fp4moe::warnings->push_back(message);
}

}  // namespace xgrammar
