#include "io/checkpoint/eagle3_tensors.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

#include "base/check.h"

namespace fp4moe {
namespace {

constexpr std::string_view kModelPrefix = "model.";

std::string layer_name(int64_t layer) { return "model.layers." + std::to_string(layer) + "."; }

// The tensors that the configured head may have.
std::set<std::string> known_tensors(const Eagle3Config& config) {
  std::set<std::string> names = {"model.norm.weight", "model.embed_tokens.weight", "lm_head.weight", "d2t",
                                 "t2d"};
  if (config.has_fc()) names.insert("fc.weight");
  if (config.norm_before_fc) names.insert("input_norm.weight");
  for (int64_t i = 0; config.fc_norm && i < config.num_features(); ++i)
    names.insert("fc_norm." + std::to_string(i) + ".weight");
  for (int64_t layer = 0; layer < config.layers.num_layers; ++layer)
    for (const char* part :
         {"input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
          "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"})
      names.insert(layer_name(layer) + part + ".weight");
  names.insert(layer_name(0) + "hidden_norm.weight");
  return names;
}

// Checks that the target has what the checkpoint lacks.
Status check_shared_tensors(const Checkpoint& tensors, const Eagle3Config& config) {
  const int64_t draft = config.layers.vocab_size, all = config.target_vocab_size;
  const auto missing = [&](const char* name, const std::string& reason) {
    return unsupported("'" + tensors.folder() + "' has no tensor '" + name + "', and " + reason);
  };
  const bool has_head = tensors.find("lm_head.weight") != nullptr;
  const std::string vocabulary =
      "draft_vocab_size = " + std::to_string(draft) + " of vocab_size = " + std::to_string(all);
  if (!has_head && draft < all)
    return missing("lm_head.weight", "the target's has other rows: " + vocabulary);
  if (draft < all && tensors.find("d2t") == nullptr)
    return missing("d2t", "the ids of the draft need it: " + vocabulary);
  if (config.layers.hidden_size == config.target_hidden_size) return {};
  const std::string widths =
      "the target's has other columns: hidden_size = " + std::to_string(config.layers.hidden_size) +
      ", target_hidden_size = " + std::to_string(config.target_hidden_size);
  if (!has_head) return missing("lm_head.weight", widths);
  if (tensors.find("model.embed_tokens.weight") == nullptr)
    return missing("model.embed_tokens.weight", widths);
  return {};
}

}  // namespace

std::string eagle3_tensor_name(std::string_view stored) {
  constexpr std::pair<std::string_view, std::string_view> kRenamed[] = {{"midlayer.", "layers.0."},
                                                                        {"aux_norm_low.", "fc_norm.0."},
                                                                        {"aux_norm_mid.", "fc_norm.1."},
                                                                        {"aux_norm_high.", "fc_norm.2."}};
  constexpr std::array<std::string_view, 3> kInModel = {"layers.", "norm.", "embed_tokens."};
  if (stored.starts_with(kModelPrefix)) stored.remove_prefix(kModelPrefix.size());
  std::string name(stored);
  for (const auto& [from, to] : kRenamed)
    if (stored.starts_with(from)) name = std::string(to) + std::string(stored.substr(from.size()));
  const bool is_in_model = std::any_of(kInModel.begin(), kInModel.end(),
                                       [&](std::string_view part) { return name.starts_with(part); });
  return (is_in_model ? std::string(kModelPrefix) : "") + name;
}

Result<Checkpoint> eagle3_tensors(const Checkpoint& stored, const Eagle3Config& config) {
  const std::set<std::string> known = known_tensors(config);
  std::map<std::string, std::string> stored_names;  // by the name here
  std::vector<TensorEntry> tensors;
  for (const TensorEntry& tensor : stored.tensors()) {
    if (tensor.name.ends_with("rotary_emb.inv_freq")) continue;
    TensorEntry& entry = tensors.emplace_back(tensor);
    entry.name = eagle3_tensor_name(tensor.name);
    if (!known.contains(entry.name))
      return unsupported("'" + stored.folder() + "' has tensor '" + tensor.name + "' " +
                         dtype_name(tensor.view.dtype) + " " + shape_string(tensor.view.shape) +
                         ", which the EAGLE-3 head of its config.json does not use");
    const auto [at, is_new] = stored_names.emplace(entry.name, tensor.name);
    if (!is_new)
      return data_loss("'" + stored.folder() + "' has tensors '" + at->second + "' and '" + tensor.name +
                       "', which have the same meaning");
  }
  Checkpoint renamed = Checkpoint::in_memory(stored.folder(), std::move(tensors), nullptr);
  FP4MOE_RETURN_IF_ERROR(check_shared_tensors(renamed, config));
  return renamed;
}

Result<Checkpoint> open_eagle3_head(const std::string& folder, const ModelConfig& target) {
  FP4MOE_ASSIGN_OR_RETURN(const Eagle3Config config, load_eagle3_config(folder, target));
  FP4MOE_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::open(folder));
  FP4MOE_RETURN_IF_ERROR(eagle3_tensors(checkpoint, config).status());
  return checkpoint;
}

Result<std::vector<int32_t>> eagle3_token_ids(const Checkpoint& tensors, const Eagle3Config& config) {
  std::vector<int32_t> ids;
  if (tensors.find("d2t") == nullptr) return ids;
  const int64_t draft = config.layers.vocab_size, all = config.target_vocab_size;
  FP4MOE_ASSIGN_OR_RETURN(const TensorView offsets, tensors.get("d2t", DType::kI64, {draft}));
  std::vector<bool> is_drafted(static_cast<size_t>(all));
  for (int64_t i = 0; i < draft; ++i) {
    const int64_t offset = offsets.as<int64_t>()[i];
    if (offset < -i || offset >= all - i || is_drafted[static_cast<size_t>(i + offset)])
      return data_loss("tensor 'd2t': id " + std::to_string(i) + " + " + std::to_string(offset) +
                       "; legal: different ids of the target from 0 to " + std::to_string(all - 1));
    ids.push_back(static_cast<int32_t>(i + offset));
    is_drafted[static_cast<size_t>(i + offset)] = true;
  }
  if (tensors.find("t2d") == nullptr) return ids;
  FP4MOE_ASSIGN_OR_RETURN(const TensorView drafted, tensors.get("t2d", DType::kBool, {all}));
  for (int64_t i = 0; i < all; ++i)
    if ((drafted.as<uint8_t>()[i] != 0) != is_drafted[static_cast<size_t>(i)])
      return data_loss("tensor 't2d' differs from 'd2t' at id " + std::to_string(i));
  return ids;
}

}  // namespace fp4moe
