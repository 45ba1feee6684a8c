#include "io/mtp_layers.h"

#include <charconv>

namespace fp4moe {

bool is_mtp_name(const ModelConfig& config, std::string_view name) {
  constexpr std::string_view kModel = "model.", kMtp = "mtp.", kLayers = "layers.";
  if (name.starts_with(kModel)) name.remove_prefix(kModel.size());
  if (name.starts_with(kMtp)) return true;
  if (!name.starts_with(kLayers)) return false;
  name.remove_prefix(kLayers.size());
  int64_t layer = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
  const bool is_number = error == std::errc() && (end == name.data() + name.size() || *end == '.');
  return is_number && layer >= config.num_layers;
}

std::string describe_skipped_mtp(const ModelConfig& config, const Checkpoint& checkpoint) {
  int64_t num_tensors = 0, num_bytes = 0;
  const std::string* first = nullptr;
  for (const TensorEntry& tensor : checkpoint.tensors()) {
    if (!is_mtp_name(config, tensor.name)) continue;
    if (first == nullptr) first = &tensor.name;
    ++num_tensors;
    num_bytes += tensor.view.num_bytes();
  }
  if (first == nullptr) return {};
  return "skipping " + std::to_string(num_tensors) + " tensors (" + std::to_string(num_bytes) +
         " bytes) of multi-token prediction, from '" + *first + "'";
}

}  // namespace fp4moe
