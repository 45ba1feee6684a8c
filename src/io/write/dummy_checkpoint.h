// Weights for benchmarks: the tensors that a configuration requires, with random content and no files.
#pragma once

#include <string>

#include "fp4moe/status.h"
#include "io/checkpoint/checkpoint.h"
#include "io/config/model_config.h"
#include "io/tokenizer/tokenizer.h"

namespace fp4moe {

// Makes the tensors that make_tiny would write for this configuration: same names, types and distributions.
// Tensors of one kind share a pool of random bytes, in which a tensor's name determines its offset, so memory
// is limited to a few pools of at most 16 MiB, whatever the model's size. kDoesNotFit if the system refuses
// the memory or address space. `folder` is used in messages.
Result<Checkpoint> dummy_checkpoint(const ModelConfig& config, const std::string& folder);

// Returns dummy_checkpoint() if load_format is "dummy", otherwise the folder's safetensors.
Result<Checkpoint> open_weights(const std::string& folder, const std::string& load_format,
                                const ModelConfig& config);

// Loads `path`, a file or folder. With load_format "dummy" and no tokenizer in the folder, returns a
// byte-level one (3 special tokens and the 256 bytes).
Result<Tokenizer> open_tokenizer(const std::string& path, const std::string& load_format);

}  // namespace fp4moe
