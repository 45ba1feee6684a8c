// From what the user typed to what the engine runs: SGLang's automatic choices, its environment variables and
// its names, resolved before anything is loaded. Which combinations are legal is plan_moe()'s to say.
#pragma once

#include <string>
#include <vector>

#include "formats/fp4_matrix.h"
#include "fp4moe/config.h"
#include "fp4moe/status.h"

namespace fp4moe {

struct FlagNote {
  LogLevel level = LogLevel::kInfo;
  std::string text;
};

struct ResolvedFlags {
  EngineConfig flags;           // sglang_flags and environment are empty, used up
  std::vector<FlagNote> notes;  // every choice that was made for the user, and every flag that is moot
};

// `format` is the checkpoint's. Sets ep_size, deepep_mode, the dispatch types (never "auto" for the a2a in
// use) and fp4_act_scales. kInvalidArgument: an unknown word or a number out of range;
// kUnsupported: known to SGLang, not here; the message holds the nearest legal choice. Resolving twice
// changes nothing, except that chunked_prefill_size is divided by dp_size again.
Result<ResolvedFlags> resolve_flags(const EngineConfig& flags, Fp4Format format);

// The one formula of a transport's capacity: the most tokens that a rank dispatches in a step, which is its
// share of a full prefill and one row of every running request, by data-parallel group, then by rank.
int64_t dispatch_tokens_per_rank(const EngineConfig& flags);

}  // namespace fp4moe
