// Makes the files of a make_tiny checkpoint, except the tensors.
#pragma once

#include "fp4moe/status.h"
#include "io/json_document.h"
#include "io/write/make_tiny.h"

namespace fp4moe {

struct MakeTinyFiles {
  Json config, hf_quant;  // hf_quant is null if the dialect has none
  Json generation, tokenizer_config;
  Json tokenizer;        // null if there are ranks
  std::string tiktoken;  // the ranks; empty if there is tokenizer.json
};

// kInvalidArgument: an unknown option value, or an option that the shape does not have.
Result<MakeTinyFiles> make_tiny_files(const MakeTinyOptions& options);

}  // namespace fp4moe
