#include "io/checkpoint/kv_scales.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>

#include "base/check.h"
#include "io/checkpoint/fp4_tensors.h"

namespace fp4moe {
namespace {

// Names after "self_attn.", in order of precedence.
constexpr std::string_view kKeyScales[] = {"k_scale", "k_proj.k_scale", "attn.k_scale", "kv_scale"};
constexpr std::string_view kValueScales[] = {"v_scale", "v_proj.v_scale", "attn.v_scale", "kv_scale"};
constexpr std::string_view kQueryScale = "q_scale";  // not read: queries are not quantised

Result<std::optional<float>> find_scale(const Checkpoint& checkpoint, const std::string& prefix,
                                        std::span<const std::string_view> names) {
  for (const std::string_view name : names) {
    const TensorEntry* entry = checkpoint.find(prefix + std::string(name));
    if (entry == nullptr) continue;
    const DType dtype = entry->view.dtype == DType::kBF16 ? DType::kBF16 : DType::kF32;
    FP4MOE_ASSIGN_OR_RETURN(const float scale, load_tensor_scale(checkpoint, entry->name, dtype));
    if (!std::isfinite(1 / scale))
      return data_loss("tensor '" + entry->name + "' is too small; legal: scales with a finite reciprocal");
    return std::optional<float>(scale);
  }
  return std::optional<float>();
}

}  // namespace

bool is_kv_scale(std::string_view name) {
  constexpr std::string_view kAttention = ".self_attn.";
  const size_t at = name.find(kAttention);
  if (at == name.npos) return false;
  name.remove_prefix(at + kAttention.size());
  const auto is_one_of = [&](std::span<const std::string_view> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  return is_one_of(kKeyScales) || is_one_of(kValueScales) || name == kQueryScale;
}

Result<KvScales> load_kv_scales(const Checkpoint& checkpoint, const std::string& prefix) {
  FP4MOE_ASSIGN_OR_RETURN(const std::optional<float> k, find_scale(checkpoint, prefix, kKeyScales));
  FP4MOE_ASSIGN_OR_RETURN(const std::optional<float> v, find_scale(checkpoint, prefix, kValueScales));
  return KvScales{k.value_or(v.value_or(1)), v.value_or(k.value_or(1))};
}

}  // namespace fp4moe
