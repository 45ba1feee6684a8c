// Writes random EAGLE-3 heads, for tests and benchmarks that need a head's structure but not good drafts.
#pragma once

#include <cstdint>
#include <string>

#include "fp4moe/status.h"

namespace fp4moe {

struct MakeTinyEagle3Options {
  std::string target;  // folder with the config.json of the target
  // A JSON object whose keys replace those of the head's config.json (RFC 7396: null removes a key). Default:
  // one layer of the target's width and heads, a draft vocabulary of half of the target's ids, and the
  // residuals after the first, the middle and the last layer.
  std::string changes = "{}";
  bool has_embedding = false;  // "embed_tokens.weight" even if the target's would do
  bool has_lm_head = false;    // "lm_head.weight" even if the target's would do
  uint64_t seed = 0;
};

// Writes config.json, last, and model.safetensors into `folder`, which must be absent or empty. One layer is
// named "midlayer", several "layers.<i>". The draft's ids are spread evenly over the target's. Errors as
// parse_eagle3_config() and make_tiny().
Status make_tiny_eagle3(const std::string& folder, const MakeTinyEagle3Options& options);

}  // namespace fp4moe
