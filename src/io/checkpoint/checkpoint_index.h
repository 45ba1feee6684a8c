// model.safetensors.index.json: which shard holds which tensor.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

struct CheckpointIndex {
  std::vector<std::string> files;              // sorted, without duplicates
  std::map<std::string, std::string> tensors;  // name -> file
};

// kDataLoss: malformed or without tensors; kInvalidArgument: a file name that is not the plain name of a
// .safetensors file in the same folder ("../x", "/x", "a/b").
Result<CheckpointIndex> parse_checkpoint_index(std::string_view json);

}  // namespace fp4moe
