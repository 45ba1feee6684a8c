// Prompts with reference logits, and functions that compute a checkpoint's logits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fp4moe/config.h"
#include "fp4moe/status.h"
#include "io/checkpoint/checkpoint.h"
#include "io/config/model_config.h"

namespace fp4moe {

struct ReferencePrompt {
  std::vector<int32_t> ids;   // [T]
  std::vector<float> logits;  // [n, V], of the last n ids
};

// Reads an I64 tensor of ids and an F32 tensor of logits from a safetensors file.
Result<ReferencePrompt> read_reference(const std::string& file, const std::string& ids_name,
                                       const std::string& logits_name);

struct LogitsRun {
  std::string folder;  // checkpoint
  EngineConfig flags;  // dtype, runner, threads
  int64_t chunk = 0;   // prompt tokens in one forward_model(); 0: all
  int page_size = 16;
  const Checkpoint* checkpoint = nullptr;  // read instead of the folder's weights
};

// Logits [T, V] of the prompt, computed chunk by chunk with logits for every row.
Result<std::vector<float>> compute_logits(const LogitsRun& run, const std::vector<int32_t>& ids);

// Logits [rows, V] of several prompts in one forward_model(), one prompt after another.
Result<std::vector<float>> compute_batch_logits(const LogitsRun& run,
                                                const std::vector<std::vector<int32_t>>& prompts);

}  // namespace fp4moe
