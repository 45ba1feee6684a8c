// Names that users of SGLang bring along and that have no row or field of their own here: flags, backends,
// quantizations and environment variables, each with what becomes of it.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "fp4moe/status.h"

namespace fp4moe {

// A flag that EngineConfig has no field for.
struct SglangFlag {
  enum class Fate : uint8_t {
    kMoot,         // accepted; a log line says `text`
    kRefused,      // kUnsupported; `text` says why and what to do instead
    kSpeculative,  // kUnsupported: one text for all of them
  };
  const char* names;     // CLI11's: "--a,--b"; the first is the flag's name
  int num_values;        // 0, 1, or -1 for a list
  Fate fate;             // of any value but those in `harmless`
  const char* text;      // what it does in SGLang, and why that is nothing here; or why it is refused
  const char* legal;     // "a|b": values that are known; others are unknown words. Null: any
  const char* harmless;  // "a|b": values that ask for what this engine does anyway. Null: none
};
std::span<const SglangFlag> sglang_flags();

// What becomes of `name` (with its dashes) given as `value`. ok: `text` is for the log, empty where there is
// nothing to say. kInvalidArgument: an unknown word; kUnsupported: known to SGLang, not here.
Result<std::string> judge_sglang_flag(std::string_view name, std::string_view value);

// A value of --moe-runner-backend, --moe-a2a-backend or --quantization that SGLang knows and this engine has
// nothing for.
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

// The environment variables of SGLang's that resolve_flags() reads.
std::span<const char* const> sglang_environment();

}  // namespace fp4moe
