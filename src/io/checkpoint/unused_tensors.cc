#include "io/checkpoint/unused_tensors.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <unordered_set>

#include "base/check.h"
#include "base/log.h"
#include "io/checkpoint/fp4_tensors.h"
#include "io/checkpoint/fp8_tensors.h"
#include "io/checkpoint/kv_scales.h"
#include "io/checkpoint/mtp_layers.h"
#include "io/checkpoint/skipped_tensors.h"
#include "io/checkpoint/stored_experts.h"
#include "io/config/tensor_names.h"
#include "io/json_document.h"
#include "io/write/make_tiny_tensors.h"

namespace fp4moe {
namespace {

constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";
constexpr std::string_view kExperts = ".mlp.experts.";

// The names of the tensors that the loaders read. list_tiny_tensors() lists every family's tensors in the
// form that the declaration implies; if the checkpoint stores a module in another form, the loaders read that
// form.
class UsedNames {
 public:
  UsedNames(const Checkpoint& checkpoint, const ModelConfig& config)
      : checkpoint_(checkpoint), method_(config.quant.method) {
    for (TinyTensor& tensor : list_tiny_tensors(config)) add(std::move(tensor.spec.name));
  }

  bool contains(const std::string& name) const { return names_.contains(name); }

 private:
  void add(std::string name) {
    if (is_scale_of_linear(name)) return;  // added with its module's codes
    const std::string experts = fused_experts(name);
    const std::string module = linear_module(name);
    if (!experts.empty()) {
      for (const char* projection : {"gate_up_proj", "down_proj"}) add_fused(experts + projection);
    } else if (module.empty() || method_ == QuantMethod::kNone) {
      names_.insert(std::move(name));
    } else if (has_fp4_tensors(checkpoint_, method_, module)) {
      add_fp4(module);
    } else if (const TensorEntry* scales = find_fp8_scales(checkpoint_, module); scales != nullptr) {
      names_.insert({module + ".weight", scales->name, module + ".input_scale"});
    } else {
      names_.insert(module + ".weight");
    }
  }

  // Returns "model.layers.3.mlp.experts." if `name` belongs to a routed expert, such as
  // "model.layers.3.mlp.experts.7.up_proj.weight", and the checkpoint stores a projection of all experts in
  // one tensor (ModelOpt or bf16).
  std::string fused_experts(const std::string& name) const {
    const size_t at = name.find(kExperts);
    if (at == name.npos || name.find('.', at + kExperts.size()) == name.npos) return {};
    std::string prefix = name.substr(0, at + kExperts.size());
    const bool is_fused = has_fused_bf16_experts(checkpoint_, prefix) ||
                          (method_ == QuantMethod::kModelOptNvfp4 &&
                           checkpoint_.find(prefix + "gate_up_proj.weight") != nullptr);
    return is_fused ? prefix : std::string();
  }

  void add_fused(const std::string& projection) {
    if (checkpoint_.find(projection) != nullptr)
      names_.insert(projection);
    else if (method_ != QuantMethod::kNone)
      add_fp4(projection);
  }

  // Returns the linear layer, FP4, FP8 or bf16, to which a listed tensor belongs; empty if it belongs to
  // none.
  static std::string linear_module(const std::string& name) {
    const size_t end = name.rfind('.');
    const std::string module = name.substr(0, end == name.npos ? 0 : end);
    for (const std::string_view suffix :
         {"_proj.weight", "_proj.weight_packed", "_mqa.weight", ".conv1d.weight"})
      if (name.ends_with(suffix)) return module;
    return name == kHead || module.find(".in_proj_") != name.npos ? module : "";
  }

  static bool is_scale_of_linear(const std::string& name) {
    for (const std::string_view suffix : {".weight_scale", ".weight_scale_2", ".weight_scale_inv", ".scale",
                                          ".input_scale", ".weight_global_scale", ".input_global_scale"})
      if (name.ends_with(suffix)) return true;
    return false;
  }

  void add_fp4(const std::string& module) {
    names_.insert(fp4_codes_name(method_, module));
    names_.insert(fp4_scales_name(method_, module));
    if (method_ == QuantMethod::kModelOptNvfp4)
      names_.insert({module + ".weight_scale_2", module + ".input_scale"});
    if (method_ == QuantMethod::kCompressedNvfp4)
      names_.insert({module + ".weight_global_scale", module + ".input_global_scale"});
  }

  const Checkpoint& checkpoint_;
  const QuantMethod method_;
  std::unordered_set<std::string> names_;
};

bool is_copy_of_embedding(const Checkpoint& checkpoint, const ModelConfig& config,
                          const TensorEntry& tensor) {
  const TensorEntry* embedding = checkpoint.find(kEmbedding);
  if (!config.tie_word_embeddings || tensor.name != kHead || embedding == nullptr) return false;
  const TensorView &a = tensor.view, &b = embedding->view;
  return a.dtype == b.dtype && a.shape == b.shape &&
         std::memcmp(a.data, b.data, static_cast<size_t>(a.num_bytes())) == 0;
}

bool is_vision_tensor(const ModelConfig& config, std::string_view name) {
  return !config.text_prefix.empty() && is_vision_name(name);
}

bool is_known(const Checkpoint& checkpoint, const ModelConfig& config, const TensorEntry& tensor,
              bool loads_mtp) {
  const bool is_mtp =
      loads_mtp ? is_mtp_copy(config, tensor.name) : is_mtp_tensor(config, checkpoint, tensor.name);
  return tensor.name.ends_with("rotary_emb.inv_freq") || is_vision_tensor(config, tensor.name) ||
         is_kv_scale(tensor.name) || is_mtp || is_copy_of_embedding(checkpoint, config, tensor);
}

// Returns a tensor name from a file, escaped and cut for a log line.
std::string quoted(const std::string& name) {
  constexpr size_t kMostBytes = 160;
  std::string text = Json(name.substr(0, kMostBytes)).dump(-1, ' ', true, Json::error_handler_t::replace);
  text.front() = text.back() = '\'';
  return text;
}

// Returns the key of config.json, with its value, because of which a tensor is not read; empty: unknown.
std::string key_against(const std::string& name, const ModelConfig& config) {
  const auto text = [](bool value) { return value ? std::string("true") : std::string("false"); };
  if (is_mtp_name(config, name)) return "num_hidden_layers = " + std::to_string(config.num_layers);
  if (name == kHead) return "tie_word_embeddings = " + text(config.tie_word_embeddings);
  const bool is_qwen2 = config.family == ModelFamily::kQwen2Moe;
  if (name.find(".self_attn.") != name.npos && name.ends_with(".bias"))
    return (is_qwen2 ? "qkv_bias = " : "attention_bias = ") + text(config.attention_bias);
  const size_t at = name.find(kExperts);
  if (at != name.npos && std::atoll(name.c_str() + at + kExperts.size()) >= config.num_experts)
    return "the number of experts = " + std::to_string(config.num_experts);
  return {};
}

// Returns an unused tensor that exists only in FP4 dialects, if no dialect is declared.
const TensorEntry* find_undeclared_fp4(const UnusedTensors& unused, const ModelConfig& config) {
  if (config.quant.method != QuantMethod::kNone) return nullptr;
  for (const TensorEntry* tensor : unused.in_model)
    for (const std::string_view suffix : {"_blocks", ".weight_packed", ".weight_scale"})
      if (tensor->name.ends_with(suffix)) return tensor;
  return nullptr;
}

}  // namespace

UnusedTensors find_unused_tensors(const Checkpoint& checkpoint, const ModelConfig& config, bool loads_mtp) {
  ModelConfig read = config;
  if (loads_mtp) read.num_mtp_layers = 1;
  const UsedNames used(checkpoint, read);
  UnusedTensors unused;
  for (const TensorEntry& tensor : checkpoint.tensors()) {
    if (used.contains(tensor.name) || is_known(checkpoint, config, tensor, loads_mtp)) continue;
    const bool in_model = tensor.name.starts_with("model.") || tensor.name.starts_with("lm_head.");
    (in_model ? unused.in_model : unused.elsewhere).push_back(&tensor);
  }
  return unused;
}

std::string describe_unused_tensors(const std::vector<const TensorEntry*>& tensors,
                                    const ModelConfig& config) {
  constexpr size_t kMostNames = 3;
  std::string line =
      std::to_string(tensors.size()) +
      (tensors.size() == 1 ? " tensor of the checkpoint is" : " tensors of the checkpoint are") +
      " not used: ";
  for (size_t i = 0; i < std::min(kMostNames, tensors.size()); ++i)
    line += (i > 0 ? ", " : "") + quoted(tensors[i]->name);
  if (tensors.size() > kMostNames) line += ", ...";
  const std::string key = key_against(tensors[0]->name, config);
  return key.empty() ? line : line + " (config.json: " + key + ")";
}

Status check_unused_tensors(const Checkpoint& checkpoint, const ModelConfig& config, bool allow,
                            bool loads_mtp) {
  const UnusedTensors unused = find_unused_tensors(checkpoint, config, loads_mtp);
  if (const TensorEntry* fp4 = find_undeclared_fp4(unused, config); fp4 != nullptr)
    return undeclared_fp4(fp4->name);
  if (!unused.in_model.empty()) {
    const std::string line = describe_unused_tensors(unused.in_model, config);
    if (!allow)
      return unsupported("'" + checkpoint.folder() + "': " + line +
                         ", so the model would differ from the saved one; legal: a config.json that "
                         "matches the tensors, or --allow-unused-tensors");
    log_warning(line);
  }
  if (!unused.elsewhere.empty()) log_warning(describe_unused_tensors(unused.elsewhere, config));
  if (const std::string mtp = describe_skipped_mtp(config, checkpoint, loads_mtp); !mtp.empty())
    log_info(mtp);
  const auto is_vision = [&](std::string_view name) { return is_vision_tensor(config, name); };
  const std::string vision = describe_skipped(checkpoint, is_vision, "of the vision model, which is not run");
  if (!vision.empty()) log_info(vision);
  return {};
}

}  // namespace fp4moe
