#include <xgrammar/work_budget.h>
#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>

#include "engine/grammar/grammar.h"
#include "engine/grammar/grammar_text.h"

namespace fp4moe {
namespace {

// xgrammar's warnings from the compilation on this thread; each names a part that it would ignore.
thread_local std::vector<std::string>* warnings = nullptr;

// Removes the condition from "Check failed: (condition) is false: message"; it only helps xgrammar's authors.
std::string without_condition(const std::string& message) {
  constexpr std::string_view kEnd = " is false: ";
  const size_t end = message.find(kEnd);
  return end == std::string::npos ? message : message.substr(end + kEnd.size());
}

// Returns the error for a limit; `what` is "the mask" or similar; `part` is the text from costliest_part().
Status over_budget(const xgrammar::WorkBudget::Error& error, const std::string& what,
                   const GrammarBudget& budget, const std::string& part) {
  using Limit = xgrammar::WorkBudget::Limit;
  if (error.limit() == Limit::kCancelled) return cancelled(what + " was cancelled");
  const std::string rule = error.rule().empty() ? "" : " at its rule " + error.rule().substr(0, 60);
  const std::string end = rule + (part.empty() ? "" : ": " + part);
  if (error.limit() == Limit::kDepth)
    return invalid_argument(what + " nests deeper than " + std::to_string(xgrammar::WorkBudget::kMaxDepth) +
                            " levels" + end);
  if (error.limit() == Limit::kBytes)
    return invalid_argument(what + " needs more than " + std::to_string(budget.max_bytes) + " bytes" + end);
  return invalid_argument(what + " takes more than " + std::to_string(budget.max_steps) + " steps" + end);
}

// An error of the client's grammar. enforced_text() has found those of JSON schemas, except for schemas whose
// values never end.
Status refusal(const GrammarSpec& spec, const std::string& message) {
  if (spec.kind != GrammarSpec::Kind::kJsonSchema) return invalid_argument(message);
  if (message.find("no text matches") != std::string::npos)
    return invalid_argument(
        "no value matches the JSON schema: an object of it requires itself, without an end; make the "
        "property "
        "optional, or allow null or an empty list");
  return invalid_argument("the JSON schema has a part that cannot be enforced; use fewer keywords in it");
}

// Calls f() within the budget and adds the steps it took to num_steps.
template <typename F>
Status run_bounded(const std::string& what, const GrammarBudget& budget, const std::string& part,
                   int64_t& num_steps, const F& f) {
  const xgrammar::WorkBudget work(budget.max_steps, budget.max_bytes, budget.is_cancelled);
  Status status;
  try {
    f();
  } catch (const xgrammar::WorkBudget::Error& error) {
    status = over_budget(error, what, budget, part);
  } catch (const std::bad_alloc&) {
    status = unavailable("no memory for " + what);
  } catch (const std::exception& error) {
    status = internal_error(what + ": " + without_condition(error.what()));
  }
  num_steps += work.num_steps();
  return status;
}

class XgrammarMatcher final : public GrammarMatcher {
 public:
  XgrammarMatcher(xgrammar::GrammarMatcher matcher, std::shared_ptr<const std::string> part)
      : matcher_(std::move(matcher)), part_(std::move(part)) {}

  Status fill_allowed(std::span<uint32_t> allowed, const GrammarBudget& budget) override {
    auto size = static_cast<int64_t>(allowed.size());
    DLTensor tensor{.data = allowed.data(),
                    .device = {kDLCPU, 0},
                    .ndim = 1,
                    .dtype = xgrammar::GetBitmaskDLType(),
                    .shape = &size,
                    .strides = nullptr,
                    .byte_offset = 0};
    const Status status = run_bounded("a mask of the grammar", budget, *part_, num_steps_,
                                      [&] { matcher_.FillNextTokenBitmask(&tensor); });
    if (!status.ok() || std::any_of(allowed.begin(), allowed.end(), [](uint32_t word) { return word != 0; }))
      return status;
    return invalid_argument(
        "the text so far is a dead end in the grammar: no token can follow and the text cannot end");
  }

  Status accept(int32_t id, const GrammarBudget& budget) override {
    bool is_allowed = false;
    const std::string what = "token " + std::to_string(id) + " in the grammar";
    const Status status =
        run_bounded(what, budget, *part_, num_steps_, [&] { is_allowed = matcher_.AcceptToken(id); });
    if (!status.ok() || is_allowed) return status;
    return internal_error("token " + std::to_string(id) + " violates the grammar");
  }

  void rollback(int64_t num_tokens) override {
    const xgrammar::WorkBudget work(kAcceptBudget.max_steps, kAcceptBudget.max_bytes, nullptr);
    matcher_.Rollback(static_cast<int>(num_tokens));
  }

  bool has_ended() const override { return matcher_.IsTerminated(); }
  int64_t num_steps() const override { return num_steps_; }

 private:
  xgrammar::GrammarMatcher matcher_;
  const std::shared_ptr<const std::string> part_;
  int64_t num_steps_ = 0;
};

class XgrammarGrammar final : public Grammar {
 public:
  XgrammarGrammar(xgrammar::CompiledGrammar compiled, const std::string& part)
      : compiled_(std::move(compiled)), part_(std::make_shared<const std::string>(part)) {}
  std::unique_ptr<GrammarMatcher> make_matcher() const override {
    const bool has_stop_tokens = !compiled_.GetTokenizerInfo().GetStopTokenIds().empty();
    return std::make_unique<XgrammarMatcher>(
        xgrammar::GrammarMatcher(compiled_, std::nullopt, /*terminate_without_stop_token=*/!has_stop_tokens),
        part_);
  }
  int64_t num_bytes() const override { return static_cast<int64_t>(compiled_.MemorySizeBytes()); }
  int64_t num_steps() const override { return num_steps_; }
  void set_num_steps(int64_t num_steps) { num_steps_ = num_steps; }

 private:
  const xgrammar::CompiledGrammar compiled_;
  const std::shared_ptr<const std::string> part_;
  int64_t num_steps_ = 0;
};

class XgrammarCompiler final : public GrammarCompiler {
 public:
  XgrammarCompiler(const Tokenizer& tokenizer, int64_t vocab_size, std::vector<int32_t> eos_token_ids)
      : tokenizer_(tokenizer), vocab_size_(vocab_size), eos_token_ids_(std::move(eos_token_ids)) {}

  Result<std::shared_ptr<const Grammar>> compile(const GrammarSpec& spec,
                                                 const GrammarBudget& budget) override {
    const Result<std::string> text = enforced_text(spec);
    if (!text.ok()) return text.status();
    std::call_once(prepared_, [this] { prepare(); });
    std::vector<std::string> ignored;
    warnings = &ignored;
    const std::string part = costliest_part(spec);
    std::shared_ptr<XgrammarGrammar> grammar;
    int64_t num_steps = 0;
    Status status = run_bounded("the grammar", budget, part, num_steps, [&] {
      grammar = compile_checked({spec.kind, *text}, part);
    });
    warnings = nullptr;
    // xgrammar reports errors of the client's grammar as exceptions.
    if (status.code() == StatusCode::kInternal) status = refusal(spec, status.message());
    if (status.ok() && !ignored.empty()) status = refusal(spec, ignored.front());
    if (!status.ok()) return status;
    grammar->set_num_steps(num_steps);
    return std::shared_ptr<const Grammar>(std::move(grammar));
  }

 private:
  // Sorting a large vocabulary takes a tenth of a second, so it happens at the first grammar, not at startup.
  // Special tokens get a leading byte that occurs in no text, so that they are allowed only by a structural
  // tag that names their ids.
  void prepare() {
    std::vector<std::string> texts(static_cast<size_t>(vocab_size_));
    for (int32_t id = 0; id < vocab_size_; ++id)
      texts[static_cast<size_t>(id)] =
          (tokenizer_.is_special(id) ? "\xFF" : "") + std::string(tokenizer_.token_bytes(id));
    const xgrammar::TokenizerInfo info(texts, xgrammar::VocabType::RAW, static_cast<int>(vocab_size_),
                                       eos_token_ids_);
    // One thread: a budget belongs to its thread, and the store limits the number of concurrent compilations.
    compiler_.emplace(info, /*max_threads=*/1, /*cache_enabled=*/false);
  }

  // Also runs a matcher's first step, which every output takes: a grammar whose first step exceeds the budget
  // is refused.
  std::shared_ptr<XgrammarGrammar> compile_checked(const GrammarSpec& spec, const std::string& part) {
    auto grammar = std::make_shared<XgrammarGrammar>(compile_kind(spec), part);
    const xgrammar::WorkBudget first_step(kAcceptBudget.max_steps, kAcceptBudget.max_bytes, nullptr);
    grammar->make_matcher();
    return grammar;
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

// xgrammar's log output (XGRAMMAR_LOG_CUSTOMIZE, scripts/setup).
namespace xgrammar {

[[noreturn]] void LogFatalImpl(const std::string& file, int lineno, const std::string& message);
void LogMessageImpl(const std::string& file, int lineno, int level, const std::string& message);

void LogFatalImpl(const std::string&, int, const std::string& message) { throw std::runtime_error(message); }

void LogMessageImpl(const std::string&, int, int level, const std::string& message) {
  constexpr int kWarning = 2;
  if (level == kWarning && fp4moe::warnings != nullptr) fp4moe::warnings->push_back(message);
}

}  // namespace xgrammar
