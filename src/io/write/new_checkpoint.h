// Helpers shared by the checkpoint writers. Only for the .cc files in this folder.
#pragma once

#include <string>
#include <vector>

#include "io/checkpoint/safetensors.h"

namespace fp4moe {

// Creates the folder, or removes the partial files that an interrupted writer left in it, and its shards if
// the index is partial. kInvalidArgument if it has other files; kUnavailable if a partial file is being
// written.
Status prepare_folder(const std::string& folder);
// kDoesNotFit, with the required and the free size, if the disk lacks space for the tensors.
Status check_space(const std::string& folder, const std::vector<TensorSpec>& specs);

}  // namespace fp4moe
