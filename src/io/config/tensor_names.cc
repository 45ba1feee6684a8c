#include "io/config/tensor_names.h"

#include <algorithm>
#include <array>
#include <optional>

namespace fp4moe {
namespace {

constexpr std::string_view kModel = "model.", kOuter = "language_model.", kInner = "model.language_model.";
constexpr std::array<std::string_view, 3> kVision = {"vision_tower", "mm_projector", "visual"};

// Modules of an MTP layer: below "mtp.", and in a layer of the model.
struct MtpModule {
  std::string_view below_mtp, in_layer;
};
constexpr MtpModule kMtpModules[] = {{"mtp.fc", ".eh_proj"},
                                     {"mtp.pre_fc_norm_embedding", ".enorm"},
                                     {"mtp.pre_fc_norm_hidden", ".hnorm"},
                                     {"mtp.norm", ".shared_head.norm"},
                                     {"mtp.layers.0", ""}};

// Returns what follows `module` in the name of the module or of a tensor in it.
std::optional<std::string_view> rest_after(std::string_view name, std::string_view module) {
  if (!name.starts_with(module)) return std::nullopt;
  const std::string_view rest = name.substr(module.size());
  return rest.empty() || rest[0] == '.' ? std::optional(rest) : std::nullopt;
}

}  // namespace

std::string mtp_layer_name(std::string_view stored, int64_t layer) {
  for (const MtpModule& module : kMtpModules)
    if (const auto rest = rest_after(stored, module.below_mtp))
      return "model.layers." + std::to_string(layer) + std::string(module.in_layer) + std::string(*rest);
  return std::string(stored);
}

std::string text_model_name(std::string_view stored) {
  if (stored.starts_with(kInner)) return std::string(kModel) + std::string(stored.substr(kInner.size()));
  if (!stored.starts_with(kOuter)) return std::string(stored);
  stored.remove_prefix(kOuter.size());
  // Some exports have no "model." below the prefix.
  const bool is_whole =
      stored.starts_with("model") || stored.starts_with("lm_head") || stored.starts_with('*');
  return (is_whole ? "" : std::string(kModel)) + std::string(stored);
}

std::string stored_name(std::string_view prefix, std::string_view name, int64_t mtp_layer) {
  std::string stored(name);
  const std::string layer = "model.layers." + std::to_string(mtp_layer);
  for (const MtpModule& module : kMtpModules)
    if (const auto rest = rest_after(name, layer + std::string(module.in_layer)); mtp_layer >= 0 && rest)
      return std::string(module.below_mtp) + std::string(*rest);
  const bool is_below_model = name.starts_with(kModel);
  if (prefix.empty() || is_vision_name(name)) return stored;
  if (prefix == kInner)
    return is_below_model ? std::string(kInner) + std::string(name.substr(kModel.size())) : stored;
  return is_below_model || name.starts_with("lm_head") ? std::string(prefix) + stored : stored;
}

bool is_vision_name(std::string_view name) {
  if (name.starts_with(kModel)) name.remove_prefix(kModel.size());
  return std::any_of(kVision.begin(), kVision.end(), [&](std::string_view part) {
    return name.starts_with(part) &&
           (name.size() == part.size() || name[part.size()] == '.' || name[part.size()] == '*');
  });
}

std::vector<std::string> vision_modules(std::string_view text_prefix) {
  if (text_prefix == kInner) return {"model.visual"};
  if (text_prefix == kOuter) return {"vision_tower", "mm_projector"};
  return {};
}

}  // namespace fp4moe
