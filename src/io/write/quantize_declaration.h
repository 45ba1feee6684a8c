// How a quantised checkpoint declares its format and names its tensors. Only for the .cc files in this
// folder.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "io/config/model_config.h"
#include "io/json_document.h"
#include "io/write/quantize_checkpoint.h"

namespace fp4moe {

// The suffixes of a module's tensor names.
struct DialectTensors {
  std::string codes, block_scales, tensor_scale, input_scale;
  bool is_gpt_oss = false;           // codes [E, rows, blocks, 16]
  bool scales_are_divisors = false;  // tensor and input scales are stored in encode direction, with shape [1]
};

struct Declaration {
  std::string dialect;
  DialectTensors tensors;
  Json config, hf_quant;             // quantization_config; hf_quant_config.json or null
  std::vector<std::string> exclude;  // the user's patterns

  // Whether the user excludes this projection from quantisation.
  bool leaves(std::string_view module) const;
};

// kUnsupported: the same as in check_quantize().
Result<Declaration> declare(const ModelConfig& config, const QuantizeOptions& options);

// Make the declarations. `exclude`: patterns in addition to those that the dialect always leaves in bf16.
// `text_prefix` (ModelConfig): the patterns name the stored modules, and the vision model stays in bf16.
using Patterns = std::vector<std::string>;
Json declare_gpt_oss();
// Makes hf_quant_config.json. has_inputs: the checkpoint holds calibrated input scales.
Json declare_modelopt(Patterns exclude, bool has_inputs, const std::string& text_prefix = {});
Json declare_compressed(bool is_mx, Patterns exclude, bool has_inputs, const std::string& text_prefix = {});

}  // namespace fp4moe
