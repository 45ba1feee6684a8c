// Any three texts, separated by NUL, as config.json, generation_config.json and hf_quant_config.json: the
// parser refuses them, or the sizes are valid for a model.
#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

#include "base/check.h"
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

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  std::array<std::string_view, 3> texts;
  for (std::string_view& text : texts) {
    text = rest.substr(0, rest.find('\0'));
    rest.remove_prefix(std::min(text.size() + 1, rest.size()));
  }
  const auto config = parse_model_config(texts[0], texts[1], texts[2]);
  if (config.ok())
    check_config(*config);
  else
    FP4MOE_CHECK(!config.status().message().empty(), "an error without a message");
  return 0;
}
