// The prompts of `bench serving`: random prompts of given lengths, or prompts from a file.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

struct DatasetOptions {
  std::string name = "random";  // or "file"
  std::string path;             // path of the file
  int64_t num_prompts = 1000;   // maximum; a file can have fewer
  int64_t random_input_len = 1024;
  int64_t random_output_len = 1024;  // also for lines of a file without max_tokens
  double random_range_ratio = 0;     // lengths are uniform in [ratio * length, length], at least 1
  uint64_t seed = 1;
  int64_t vocab_size = 0;  // random ids are below this
  bool chat = false;       // send messages instead of prompts; random prompts are then words, not ids
};

struct ServingPrompt {
  nlohmann::ordered_json content;  // text, or token ids
  int64_t num_ids = -1;            // number of ids; -1 if the content is text
  int64_t max_tokens = 0;
};

// kNotFound: the file cannot be read; kDataLoss: a line is invalid; kInvalidArgument: a line has ids with
// `chat`.
Result<std::vector<ServingPrompt>> make_prompts(const DatasetOptions& options);

}  // namespace fp4moe
