// Makes the JSON files of a make_tiny checkpoint.
#pragma once

#include "fp4moe/status.h"
#include "io/json_document.h"
#include "io/write/make_tiny.h"

namespace fp4moe {

struct MakeTinyFiles {
  Json config, hf_quant;  // hf_quant is null if the dialect has none
  Json generation, tokenizer, tokenizer_config;
};

// kInvalidArgument: an unknown option value, or an option that the shape does not have.
Result<MakeTinyFiles> make_tiny_files(const MakeTinyOptions& options);

}  // namespace fp4moe
