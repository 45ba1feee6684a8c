// What is refused whatever the table's rows can do: rules about flags and sizes, as data, so that tools and
// documents can list them.
#pragma once

#include <span>
#include <string>

#include "moe/plan.h"

namespace fp4moe {

struct LegalityRule {
  const char* name;  // short and stable
  const char* text;  // what the rule refuses
  Status (*check)(const MoeProblem& problem, const MoeChoice& choice);
};

// In the order in which they are asked. Each may assume that the earlier ones hold.
std::span<const LegalityRule> legality_rules();

// The first refusal: kUnsupported, naming both values and the nearest legal choice (kInvalidArgument for
// numbers that are none). `choice` is what the user gave.
Status check_legality(const MoeProblem& problem, const MoeChoice& choice);

// "<what> <why>; nearest legal choice: <nearest>", kUnsupported: the form of every refusal.
Status refuse(const std::string& what, const std::string& why, const std::string& nearest);

// --ep as the rules leave it: every a2a protocol but none moves rows to whole experts, and a deterministic
// sum has no partial sums of shards of an expert, so both raise ep to tp.
constexpr int resolved_ep(const MoeChoice& choice) {
  const bool whole_experts = choice.a2a != "none" || (choice.deterministic && choice.ep == 1);
  return whole_experts ? choice.tp : choice.ep;
}

}  // namespace fp4moe
