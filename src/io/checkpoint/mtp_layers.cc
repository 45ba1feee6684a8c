#include "io/checkpoint/mtp_layers.h"

#include <charconv>

#include "io/checkpoint/skipped_tensors.h"

namespace fp4moe {

namespace {

bool remove_prefix(std::string_view& name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return false;
  name.remove_prefix(prefix.size());
  return true;
}

bool is_below_mtp(std::string_view name) {
  remove_prefix(name, "model.");
  return name.starts_with("mtp.");
}

// Returns N if `name` is "model.layers.N" or "layers.N", or begins with either and a dot; otherwise -1.
int64_t layer_number(std::string_view name) {
  remove_prefix(name, "model.");
  if (!remove_prefix(name, "layers.")) return -1;
  int64_t layer = 0;
  const char* const end = name.data() + name.size();
  const auto [at, error] = std::from_chars(name.data(), end, layer);
  return error == std::errc() && (at == end || *at == '.') ? layer : -1;
}

}  // namespace

bool is_mtp_name(const ModelConfig& config, std::string_view name) {
  return is_below_mtp(name) || layer_number(name) >= config.num_layers;
}

bool is_mtp_tensor(const ModelConfig& config, const Checkpoint& checkpoint, std::string_view name) {
  if (is_below_mtp(name)) return true;
  const int64_t layer = layer_number(name);
  if (layer < config.num_layers) return false;
  const std::string joint = "model.layers." + std::to_string(layer) + ".eh_proj.weight";
  return checkpoint.find(joint) != nullptr || checkpoint.find(joint + "_packed") != nullptr;
}

bool is_mtp_copy(const ModelConfig& config, std::string_view name) {
  const std::string prefix = "model.layers." + std::to_string(config.num_layers) + ".";
  return name == prefix + "embed_tokens.weight" || name == prefix + "shared_head.head.weight";
}

std::string describe_skipped_mtp(const ModelConfig& config, const Checkpoint& checkpoint, bool is_loaded) {
  if (is_loaded)
    return describe_skipped(
        checkpoint, [&](std::string_view name) { return is_mtp_copy(config, name); },
        "of the layer for multi-token prediction, whose embedding and LM head are the model's");
  return describe_skipped(
      checkpoint, [&](std::string_view name) { return is_mtp_tensor(config, checkpoint, name); },
      config.num_mtp_layers == 1 ? "for multi-token prediction, which --speculative-algorithm EAGLE loads"
                                 : "for multi-token prediction");
}

}  // namespace fp4moe
