// The prompts of `bench serving`: random ones of given lengths, or those of a file.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

struct DatasetOptions {
  std::string name = "random";  // or "file"
  std::string path;             // of the file
  int64_t num_prompts = 1000;   // at most; a file may have fewer
  int64_t random_input_len = 1024;
  int64_t random_output_len = 1024;  // also for a file's lines without a length
  double random_range_ratio = 0;     // lengths are uniform in [ratio * length, length], at least 1
  uint64_t seed = 1;
  int64_t vocab_size = 0;  // random ids are below this
  bool chat = false;       // messages instead of prompts; random prompts are words, not ids
};

struct ServingPrompt {
  nlohmann::ordered_json content;  // text, or token ids
  int64_t num_ids = -1;            // if the content is ids
  int64_t max_tokens = 0;
};

// kNotFound, kDataLoss: errors of the file; kInvalidArgument: ids with `chat`.
Result<std::vector<ServingPrompt>> make_prompts(const DatasetOptions& options);

}  // namespace fp4moe
