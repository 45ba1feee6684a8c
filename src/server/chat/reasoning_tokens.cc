#include "server/chat/reasoning_tokens.h"

#include <string>

namespace fp4moe {

namespace {

bool has_reasoning(const OutputPlan& plan) { return plan.thinks || plan.calls == CallSyntax::kHarmony; }

}  // namespace

ReasoningTokens::ReasoningTokens(const Engine& engine, const OutputPlan& plan)
    : engine_(engine), parser_(has_reasoning(plan) ? make_parser(plan) : nullptr) {}

// Parses the tokens' own bytes: the output's text can lack a stop string or be behind the tokens.
void ReasoningTokens::push(std::span<const int32_t> ids, int32_t end_token) {
  if (parser_ == nullptr) return;
  OutputParts parts;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] == end_token && i + 1 == ids.size()) break;
    const std::string bytes = engine_.token_bytes(ids[i]);
    if (bytes.empty()) continue;
    undecided_.push_back({num_bytes_, num_bytes_ + bytes.size()});
    num_bytes_ += bytes.size();
    parser_->push(bytes, parts);
  }
  count(parts);
}

int64_t ReasoningTokens::finish() {
  if (parser_ == nullptr) return 0;
  OutputParts parts;
  parser_->finish(parts);
  count(parts);
  return count_;
}

// Reasoning parts are in the order of the input and do not overlap.
void ReasoningTokens::count(const OutputParts& parts) {
  for (const OutputPart& part : parts) {
    if (part.kind != OutputPart::Kind::kReasoning) continue;
    const size_t end = part.at + part.text.size();
    for (; !undecided_.empty() && undecided_.front().begin < end; undecided_.pop_front())
      if (undecided_.front().end > part.at) ++count_;
  }
}

int64_t count_reasoning_tokens(const Engine& engine, const OutputPlan& plan, std::span<const int32_t> ids,
                               int32_t end_token) {
  ReasoningTokens tokens(engine, plan);
  tokens.push(ids, end_token);
  return tokens.finish();
}

}  // namespace fp4moe
