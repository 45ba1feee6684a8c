// Resolves the user's flags before anything is loaded: SGLang's automatic choices, environment variables and
// names. plan_moe() decides which combinations are legal.
#pragma once

#include <string>
#include <vector>

#include "device/device.h"
#include "formats/fp4_matrix.h"
#include "fp4moe/config.h"
#include "fp4moe/status.h"

namespace fp4moe {

struct FlagNote {
  LogLevel level = LogLevel::kInfo;
  std::string text;
};

struct ResolvedFlags {
  EngineConfig flags;           // resolved; sglang_flags and environment are cleared
  std::vector<FlagNote> notes;  // every automatic choice, and every flag without effect
};

// `format` is the checkpoint's, `device` the one that runs the model. Sets ep_size, deepep_mode, the dispatch
// types (never "auto" for the a2a in use) and fp4_act_scales. kInvalidArgument: an unknown value or a number
// out of range; kUnsupported: a value that SGLang knows but this engine does not support; the message has the
// nearest legal choice. Resolving resolved flags again does not change them.
Result<ResolvedFlags> resolve_flags(const EngineConfig& flags, Fp4Format format, DeviceKind device);

// Most rows of a decoding request in a step: one, and those of its draft tokens.
int64_t rows_per_request(const EngineConfig& flags);

// Most tokens that a rank dispatches in one step: a full prefill plus the rows of running requests, divided
// among the data-parallel groups, then among a group's ranks, each quotient rounded up.
int64_t dispatch_tokens_per_rank(const EngineConfig& flags);

}  // namespace fp4moe
