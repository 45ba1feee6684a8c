// What writers of checkpoints share. Only for the .cc files of this folder.
#pragma once

#include <string>
#include <vector>

#include "io/safetensors.h"

namespace fp4moe {

// Makes the folder; kInvalidArgument if it has something in it.
Status prepare_folder(const std::string& folder);
// kDoesNotFit, with both sizes, if the disk has no room for the tensors.
Status check_space(const std::string& folder, const std::vector<TensorSpec>& specs);

}  // namespace fp4moe
