// Rules about flags and sizes that hold for every row of the table, as data for tools and documents.
#pragma once

#include <span>
#include <string>

#include "moe/plan/plan.h"

namespace fp4moe {

struct LegalityRule {
  const char* name;  // short and stable
  const char* text;  // the combinations that the rule refuses
  Status (*check)(const MoeProblem& problem, const MoeChoice& choice);
};

// Returns the rules in the order in which they are checked. A rule can assume that all earlier rules hold.
std::span<const LegalityRule> legality_rules();

// Returns the error of the first violated rule: kUnsupported with the conflicting values and the nearest
// legal choice, or kInvalidArgument for a number out of range or an unknown name. `choice` holds the user's
// flags, unresolved.
Status check_legality(const MoeProblem& problem, const MoeChoice& choice);

// Returns kUnsupported with the message "<what> <why>; nearest legal choice: <nearest>". Every refusal has
// this form.
Status refuse(const std::string& what, const std::string& why, const std::string& nearest);

// The effective --ep. Every a2a protocol except none moves rows to whole experts, and deterministic inference
// must not add partial sums of an expert's shards, so both raise ep to tp.
constexpr int resolved_ep(const MoeChoice& choice) {
  const bool whole_experts = choice.a2a != "none" || (choice.deterministic && choice.ep == 1);
  return whole_experts ? choice.tp : choice.ep;
}

}  // namespace fp4moe
