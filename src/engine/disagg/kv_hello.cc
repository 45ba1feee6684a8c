#include "engine/disagg/kv_hello.h"

#include <algorithm>
#include <cstdio>
#include <string>

#include "base/hash.h"
#include "base/printable.h"
#include "model/plan_draft.h"

namespace fp4moe {
namespace {

constexpr const char* kWeightVersion = "weight version";
constexpr const char* kFingerprint = "checkpoint fingerprint";

// The fingerprint is equal on all machines with the same files, whatever their paths. Only some tensors'
// bytes are sampled: reading all of them would take as long as loading.
std::string fingerprint(const Checkpoint& checkpoint) {
  constexpr size_t kSampledTensors = 256;
  constexpr int64_t kSampleBytes = 64;
  uint64_t hash = 0;
  const auto add = [&hash](const void* data, int64_t num_bytes) { hash = hash64(data, num_bytes, hash); };
  const auto& tensors = checkpoint.tensors();
  const size_t stride = tensors.size() / kSampledTensors + 1;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorView& view = tensors[i].view;
    const std::string text = tensors[i].name + " " + dtype_name(view.dtype) + shape_string(view.shape);
    add(text.data(), std::ssize(text));
    if (i % stride == 0) add(view.data, std::min(kSampleBytes, view.num_bytes()));
  }
  char hex[17];
  std::snprintf(hex, sizeof hex, "%016llx", static_cast<unsigned long long>(hash));
  return hex;
}

// The drafter whose draft model's pages follow the target's.
std::string drafter_text(const DraftPlan& draft, const Checkpoint* checkpoint) {
  std::string text = draft.algorithm == DraftAlgorithm::kMtp ? "EAGLE" : "EAGLE3";
  text += std::string(", KV type ") + dtype_name(draft.plan.kv_dtype);
  return checkpoint == nullptr ? text : text + ", fingerprint " + fingerprint(*checkpoint);
}

// The shape of a state in canonical form.
std::string state_text(const ModelConfig& config, int64_t num_bytes) {
  const DeltaConfig& delta = config.delta;
  const auto num_layers = std::ranges::count(config.layer_has_state, true);
  return std::to_string(num_layers) + " layers of " + std::to_string(delta.num_value_heads) + " x " +
         std::to_string(delta.key_head_dim) + " x " + std::to_string(delta.value_head_dim) + " and " +
         std::to_string(delta.conv_channels()) + " x " + std::to_string(delta.conv_width - 1) + ", " +
         std::to_string(num_bytes) + " bytes";
}

}  // namespace

KvHello make_hello(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan,
                   const Executor& executor, const Checkpoint* draft) {
  const bool shares_draft = executor.draft_shape().takes_features;
  KvHello hello = {
      .facts = {{"protocol", std::to_string(kKvProtocol)},
                {"model", config.architecture},
                {kWeightVersion, plan.flags.weight_version},
                {kFingerprint, fingerprint(checkpoint)},
                {"KV type", dtype_name(plan.kv_dtype)},
                {"--speculative-algorithm", shares_draft ? drafter_text(*plan.draft, draft) : "none"},
                {"KV bytes of a token", std::to_string(executor.kv_token_bytes())},
                {"--page-size", std::to_string(executor.page_size())}}};
  if (executor.num_window_pages() > 0)
    hello.facts.emplace_back("KV window", std::to_string(executor.window().tokens) + " tokens, " +
                                              std::to_string(executor.window_token_bytes()) +
                                              " bytes of a token");
  if (config.has_state())
    hello.facts.emplace_back("state of a sequence", state_text(config, executor.state_bytes()));
  return hello;
}

Status check_weight_version(const std::string& version) {
  const bool is_printable = std::ranges::all_of(version, [](char c) { return c >= ' ' && c <= '~'; });
  if (is_printable && !version.empty() && version.size() <= 64) return {};
  return invalid_argument(
      "weight version \"" + printable(version, 64) + "\" of " + std::to_string(version.size()) +
      " bytes: the nodes of disaggregated serving need 1 to 64 printable ASCII characters");
}

void set_weights(KvHello& hello, const Checkpoint& checkpoint, const std::string& version) {
  for (auto& [name, value] : hello.facts) {
    if (name == kWeightVersion) value = version;
    if (name == kFingerprint) value = fingerprint(checkpoint);
  }
}

}  // namespace fp4moe
