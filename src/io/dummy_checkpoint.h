// Weights for benchmarks: the tensors that a configuration asks for, with random content and no file.
#pragma once

#include <string>

#include "fp4moe/status.h"
#include "io/checkpoint.h"
#include "io/model_config.h"
#include "io/tokenizer.h"

namespace fp4moe {

// What make_tiny would write for this configuration, names, types and distributions, but tensors of one kind
// share a pool of random bytes, and each reads it from another place on: no size needs more memory than some
// pools of 16 MiB. kDoesNotFit if the system refuses the address space. `folder` is for messages.
Result<Checkpoint> dummy_checkpoint(const ModelConfig& config, const std::string& folder);

// load_format "dummy": the above; else the folder's safetensors.
Result<Checkpoint> open_weights(const std::string& folder, const std::string& load_format,
                                const ModelConfig& config);

// From `path`, a file or folder; under load_format "dummy", if there is none, one whose tokens are the bytes.
Result<Tokenizer> open_tokenizer(const std::string& path, const std::string& load_format);

}  // namespace fp4moe
