#include "engine/step/request_intake.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/printable.h"
#include "engine/output/sampler.h"

namespace fp4moe {
namespace {

// Returns the key by which the queue is ordered, largest first.
int64_t queue_priority(std::optional<int64_t> requested, const PriorityRules& rules) {
  if (!rules.are_used) return 0;
  if (!requested) return std::numeric_limits<int64_t>::min();
  return rules.low_first ? -*requested : *requested;
}

}  // namespace

RequestIntake::RequestIntake(const Executor& executor, const Tokenizer& tokenizer,
                             const StepLoopOptions& options, Inbox& inbox, GrammarManager* grammars,
                             RemotePrefill* remote_prefill)
    : executor_(executor),
      tokenizer_(tokenizer),
      options_(options),
      limits_{executor.config().vocab_size, options.context_length},
      inbox_(inbox),
      grammars_(grammars),
      remote_prefill_(remote_prefill) {}

Result<std::string> RequestIntake::submit(Request request, DeltaCallback on_delta, Holding holding) {
  FP4MOE_RETURN_IF_ERROR(check_request(request, limits_));
  FP4MOE_RETURN_IF_ERROR(check_prefill_node(request));
  Parts parts{.on_delta = std::move(on_delta), .holding = std::move(holding)};
  FP4MOE_ASSIGN_OR_RETURN(GrammarTicket ticket, compile_grammar(request));
  if (request.routed_experts_from >= 0)
    FP4MOE_RETURN_IF_ERROR(executor_.supports_routed_experts().with_context("return_routed_experts"));
  if (request.priority && !options_.priorities.are_used) FP4MOE_RETURN_IF_ERROR(ignore_priority());
  FP4MOE_ASSIGN_OR_RETURN(parts.patterns, StopPatterns::compile(request.sampling.stop_regex));
  if (const Status failed = inbox_.failure(); !failed.ok())
    return unavailable("the engine has failed: " + failed.message());
  return inbox_.submit(std::move(request), ticket, [&](Request named, uint64_t ordinal) {
    return make_sequence(std::move(named), ordinal, parts);
  });
}

Status RequestIntake::check_prefill_node(const Request& request) const {
  if (request.prefill_node.empty()) return {};
  if (remote_prefill_ == nullptr)
    return unsupported("the request names prefill node " + printable(request.prefill_node) +
                       ", but this engine is not a decode node (--disaggregation-mode decode)");
  return remote_prefill_->check(request.prefill_node);
}

// Starts the compilation of the request's grammar. Returns an invalid ticket if it has none.
Result<GrammarTicket> RequestIntake::compile_grammar(Request& request) const {
  const GrammarSpec& spec = request.sampling.grammar;
  if (spec.kind == GrammarSpec::Kind::kNone) return GrammarTicket();
  if (grammars_ == nullptr)
    return unsupported(
        "the output must match a grammar, but this engine has no grammar backend "
        "(--grammar-backend none, or a build without xgrammar)");
  GrammarTicket ticket = grammars_->compile(spec, request.client);
  if (ticket.is_ready()) FP4MOE_RETURN_IF_ERROR(ticket.get().status());
  // The store has its own copy of the text; a prefill node needs this one.
  if (request.prefill_node.empty()) request.sampling.grammar.text = std::string();
  return ticket;
}

// Warns once, or refuses the request if refuse_unused is set.
Status RequestIntake::ignore_priority() {
  constexpr const char* kOff =
      "priority: requests are served in order of arrival because --enable-priority-scheduling is off";
  if (options_.priorities.refuse_unused) return unsupported(kOff);
  if (!warned_of_priority_.exchange(true)) log_warning(std::string(kOff) + "; the field is ignored");
  return {};
}

std::unique_ptr<Sequence> RequestIntake::make_sequence(Request request, uint64_t ordinal,
                                                       Parts& parts) const {
  const SamplingParams& sampling = request.sampling;
  const int64_t num_prompt_tokens = static_cast<int64_t>(request.input_ids.size());
  const int64_t max_new_tokens =
      parts.holding.on_held ? 1
                            : std::min(sampling.max_new_tokens, options_.context_length - num_prompt_tokens);
  OutputText text(tokenizer_, sampling.skip_special_tokens, sampling.stop, std::move(parts.patterns));
  LogitEdits edits(sampling, executor_.config().eos_token_ids);
  const auto after = [&](int64_t from) {
    return from >= 0 ? std::min(from + 1, num_prompt_tokens) : num_prompt_tokens;
  };
  const int64_t first_reported = after(request.prompt_logprobs_from);
  const bool lists_next = max_new_tokens == 0 && !sampling.token_ids_logprob.empty();
  const int64_t scored_end = num_prompt_tokens + (lists_next ? 1 : 0);
  const int64_t next_scored = std::min(first_reported, after(request.routed_experts_from));
  return std::make_unique<Sequence>(Sequence{
      .id = std::move(request.id),
      .num_prompt_tokens = num_prompt_tokens,
      .max_tokens = num_prompt_tokens + max_new_tokens,
      .token_ids = std::move(request.input_ids),
      .request = {.client = std::move(request.client),
                  .sampling = sampling,
                  .seed = sampling.seed.value_or(derived_seed(options_.random_seed, ordinal)),
                  .priority = queue_priority(request.priority, options_.priorities),
                  .timeout_seconds = request.timeout_seconds},
      .output = {.sink = std::make_shared<DeltaSink>(std::move(parts.on_delta)),
                 .text = std::move(text),
                 .edits = std::move(edits)},
      .scores = {.next = next_scored,
                 .end = scored_end,
                 .num_due = scored_end - next_scored,
                 .first_reported = first_reported},
      .experts = {.from = request.routed_experts_from},
      .disagg = {.on_held = std::move(parts.holding.on_held),
                 .prefill_node = std::move(request.prefill_node),
                 .lease = std::move(parts.holding.pages)},
      .times = {.submitted = Sequence::Clock::now()},
  });
}

}  // namespace fp4moe
