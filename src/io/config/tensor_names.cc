#include "io/config/tensor_names.h"

#include <algorithm>
#include <array>

namespace fp4moe {
namespace {

constexpr std::string_view kModel = "model.", kOuter = "language_model.", kInner = "model.language_model.";
constexpr std::array<std::string_view, 3> kVision = {"vision_tower", "mm_projector", "visual"};

}  // namespace

std::string text_model_name(std::string_view stored) {
  if (stored.starts_with(kInner)) return std::string(kModel) + std::string(stored.substr(kInner.size()));
  if (!stored.starts_with(kOuter)) return std::string(stored);
  stored.remove_prefix(kOuter.size());
  // Some exports have no "model." below the prefix.
  const bool is_whole =
      stored.starts_with("model") || stored.starts_with("lm_head") || stored.starts_with('*');
  return (is_whole ? "" : std::string(kModel)) + std::string(stored);
}

std::string stored_name(std::string_view prefix, std::string_view name) {
  std::string stored(name);
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
