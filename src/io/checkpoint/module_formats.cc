#include "io/checkpoint/module_formats.h"

#include <algorithm>
#include <string_view>

#include "io/checkpoint/fp4_tensors.h"
#include "io/checkpoint/fp8_tensors.h"

namespace fp4moe {
namespace {

// Removes the components that are numbers, and "model" and "layers" in front of them.
std::string kind_of_module(std::string_view module) {
  std::string kind;
  while (!module.empty()) {
    const size_t dot = std::min(module.find('.'), module.size());
    const std::string_view part = module.substr(0, dot);
    module.remove_prefix(std::min(dot + 1, module.size()));
    const bool is_number = part.find_first_not_of("0123456789") == part.npos;
    if (!is_number && part != "model" && part != "layers")
      kind += (kind.empty() ? "" : ".") + std::string(part);
  }
  return kind;
}

const char* fp8_format(const TensorEntry& scales, int64_t rows) {
  if (scales.view.num_elems() == 1) return "fp8 per tensor";
  return scales.view.num_elems() == rows ? "fp8 per row" : "fp8 per 128x128 block";
}

// The module whose matrix the tensor holds; empty for scales, vectors and other tensors.
std::string module_of(const TensorEntry& tensor) {
  const std::string& name = tensor.name;
  if (tensor.view.shape.size() < 2) return {};
  for (const std::string_view suffix : {".weight", ".weight_packed", "_blocks"})
    if (name.ends_with(suffix)) return name.substr(0, name.size() - suffix.size());
  return name.ends_with("_proj") ? name : std::string();  // bf16 experts in one tensor
}

}  // namespace

std::map<std::string, std::map<std::string, int64_t>> module_formats(const Checkpoint& checkpoint,
                                                                     const ModelConfig& config) {
  const QuantMethod method = config.quant.method;
  std::map<std::string, std::map<std::string, int64_t>> formats;
  for (const TensorEntry& tensor : checkpoint.tensors()) {
    const std::string module = module_of(tensor);
    if (module.empty()) continue;
    std::string format = dtype_name(tensor.view.dtype);
    if (has_fp4_tensors(checkpoint, method, module) || tensor.name.ends_with("_blocks"))
      format = is_mxfp4(method) ? "mxfp4" : "nvfp4";
    else if (const TensorEntry* scales = find_fp8_scales(checkpoint, module); scales != nullptr)
      format = fp8_format(*scales, tensor.view.shape[0]);
    ++formats[kind_of_module(module)][format];
  }
  return formats;
}

}  // namespace fp4moe
