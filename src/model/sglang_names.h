// SGLang's flags, backends, quantizations and environment variables that have no table row or EngineConfig
// field here, each with its handling.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "fp4moe/status.h"

namespace fp4moe {

// A flag of SGLang that has no field in EngineConfig.
struct SglangFlag {
  enum class Fate : uint8_t {
    kMoot,         // accepted without effect; `text` is logged
    kRefused,      // kUnsupported; `text` has the reason and the alternative
    kSpeculative,  // kUnsupported: a setting of drafts that this engine does not have
  };
  const char* names;     // in CLI11's form, "--a,--b"; the first is the flag's name
  int num_values;        // 0, 1, or -1 for a list
  Fate fate;             // for any value except those in `harmless`
  const char* text;      // kMoot: its effect in SGLang, and why it has none here; kRefused: the reason
  const char* legal;     // "a|b": the values that SGLang knows; others are invalid. Null: any value is valid
  const char* harmless;  // "a|b": values that match this engine's behaviour; accepted silently. Null: none
};
std::span<const SglangFlag> sglang_flags();

// Handles flag `name` (with its dashes) with `value`. Returns a log line, empty if nothing is to be logged.
// kInvalidArgument: unknown flag or value; kUnsupported: SGLang knows the flag, but this engine does not
// support it.
Result<std::string> judge_sglang_flag(std::string_view name, std::string_view value);

// A value of --moe-runner-backend, --moe-a2a-backend or --quantization that only SGLang supports.
struct SglangName {
  const char* name;
  const char* reason;   // follows the name: "flag=name <reason>"
  const char* nearest;  // the nearest legal choice
};
std::span<const SglangName> sglang_runners();
std::span<const SglangName> sglang_a2a();
std::span<const SglangName> sglang_quantizations();

// OK for a name that is not listed; else kUnsupported with reason and nearest legal choice.
Status check_sglang_name(std::span<const SglangName> names, const char* flag, std::string_view name);

// SGLang's environment variables that resolve_flags() reads.
std::span<const char* const> sglang_environment();

}  // namespace fp4moe
