// What `bench serving` asks: random prompts of wanted lengths, or prompts of a file.
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
  int64_t num_prompts = 1000;   // at most, where a file has fewer
  int64_t random_input_len = 1024;
  int64_t random_output_len = 1024;  // also of a file's lines that do not say
  double random_range_ratio = 0;     // lengths are uniform in [ratio * length, length], at least 1
  uint64_t seed = 1;
  int64_t vocab_size = 0;  // random ids are below it
  bool chat = false;       // messages instead of prompts; random ones are words, not ids
};

struct ServingPrompt {
  nlohmann::ordered_json content;  // text, or token ids
  int64_t num_ids = -1;            // where the content is ids
  int64_t max_tokens = 0;
};

// kNotFound, kDataLoss: the file; kInvalidArgument: ids for a chat.
Result<std::vector<ServingPrompt>> make_prompts(const DatasetOptions& options);

}  // namespace fp4moe
