// Reads the value of --init-expert-location: SGLang's JSON, or a response of GET /expert_load.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

// Exactly one of the two is not empty.
struct ExpertLocation {
  std::vector<std::vector<int32_t>> logical_of;  // [layers][physical experts]: the logical expert of each
  std::vector<std::vector<int64_t>> loads;       // [layers][E]: rows for each expert
};

struct ExpertLocationShape {
  int64_t num_layers = 0, num_logical = 0, num_physical = 0;
};

// `source`: the path of a .json file, or JSON text that starts with '{'. Accepts an object with one of the
// keys
//   "physical_to_logical_map"  [layers][physical experts]
//   "logical_count"            [layers][E], or [passes][layers][E], which is summed
//   "layers"                   as in /expert_load, with the keys "layer" and "experts"; layers that are not
//                              listed have no rows
// kInvalidArgument names the key and the value that do not fit `shape`; kUnsupported: a .pt file; kNotFound.
Result<ExpertLocation> read_expert_location(const std::string& source, const ExpertLocationShape& shape);

}  // namespace fp4moe
