// Any three texts, separated by NUL, as config.json, generation_config.json and hf_quant_config.json: the
// parser refuses them, or the sizes are valid for a model. A fourth text is the config.json of an EAGLE-3
// head for this model.
#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "io/config/eagle3_config.h"
#include "io/config/model_config.h"

using namespace fp4moe;

namespace {

void check_config(const ModelConfig& config) {
  const auto layers = static_cast<size_t>(config.num_layers);
  FP4MOE_CHECK(config.layer_windows.size() == layers, "layer_windows");
  FP4MOE_CHECK(config.layer_has_experts.empty() || config.layer_has_experts.size() == layers,
               "layer_has_experts");
  FP4MOE_CHECK(config.num_experts >= 1 && config.top_k >= 1 && config.top_k <= config.num_experts, "experts");
  FP4MOE_CHECK(config.num_heads % config.num_kv_heads == 0 && config.head_dim >= 2, "heads");
  FP4MOE_CHECK(config.rms_norm_eps > 0 && config.rope.theta > 0 && config.rope.factor >= 1, "reals");
  for (const int32_t id : config.eos_token_ids) FP4MOE_CHECK(id >= 0 && id < config.vocab_size, "eos");
  if (config.quant.method != QuantMethod::kNone)
    FP4MOE_CHECK(config.hidden_size % config.quant.group_size == 0 &&
                     config.intermediate_size % config.quant.group_size == 0,
                 "blocks");
  int64_t product = 1;
  for (const int64_t factor :
       {config.num_layers, config.num_experts, 2 * config.intermediate_size, config.hidden_size})
    FP4MOE_CHECK(!__builtin_mul_overflow(product, factor, &product), "overflow");
}

void check_head(const Eagle3Config& head, const ModelConfig& target) {
  FP4MOE_CHECK(std::ssize(head.layers.layer_windows) == head.layers.num_layers, "layer_windows");
  FP4MOE_CHECK(head.layers.num_heads % head.layers.num_kv_heads == 0 && head.layers.head_dim >= 2, "heads");
  FP4MOE_CHECK(head.target_hidden_size == target.hidden_size && head.target_vocab_size == target.vocab_size,
               "target");
  FP4MOE_CHECK(head.layers.vocab_size >= 1 && head.layers.vocab_size <= target.vocab_size, "vocabulary");
  for (size_t i = 0; i < head.after_layers.size(); ++i)
    FP4MOE_CHECK(head.after_layers[i] >= (i == 0 ? 0 : head.after_layers[i - 1] + 1) &&
                     head.after_layers[i] < target.num_layers,
                 "after_layers");
  int64_t product = 2;  // bytes of fc
  for (const int64_t factor : {head.feature_width(), head.layers.hidden_size})
    FP4MOE_CHECK(!__builtin_mul_overflow(product, factor, &product), "overflow");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  std::array<std::string_view, 4> texts;
  for (std::string_view& text : texts) {
    text = rest.substr(0, rest.find('\0'));
    rest.remove_prefix(std::min(text.size() + 1, rest.size()));
  }
  const auto config = parse_model_config(texts[0], texts[1], texts[2]);
  if (!config.ok()) {
    FP4MOE_CHECK(!config.status().message().empty(), "an error without a message");
    return 0;
  }
  check_config(*config);
  const auto head = parse_eagle3_config(texts[3], *config);
  if (head.ok())
    check_head(*head, *config);
  else
    FP4MOE_CHECK(!head.status().message().empty(), "an error without a message");
  return 0;
}
