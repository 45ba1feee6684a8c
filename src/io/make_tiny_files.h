// The JSON files of a checkpoint of make_tiny.
#pragma once

#include "fp4moe/status.h"
#include "io/json_document.h"
#include "io/make_tiny.h"

namespace fp4moe {

struct MakeTinyFiles {
  Json config, hf_quant;  // hf_quant is null where the dialect has none
  Json generation, tokenizer, tokenizer_config;
};

// kInvalidArgument: an option that names nothing known, or that the shape does not have.
Result<MakeTinyFiles> make_tiny_files(const MakeTinyOptions& options);

}  // namespace fp4moe
