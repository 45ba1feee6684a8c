// The config.json of an EAGLE-3 head: a small draft model that continues a target's hidden states. Parsed,
// checked against the target's configuration, and typed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/config/model_config.h"

namespace fp4moe {

struct Eagle3Config {
  // The head's layers, as a model without experts. vocab_size is that of the head's logits, and
  // max_position_embeddings is the target's: the head's own is not a limit.
  ModelConfig layers;
  // A row's features are the target's residual after each of these layers (0-based, ascending), side by side;
  // empty: the output of the target's last layer after the final norm.
  std::vector<int64_t> after_layers;
  int64_t target_hidden_size = 0;  // the width of one feature
  int64_t target_vocab_size = 0;
  bool norm_before_fc = false;        // "input_norm" is a norm of all features together
  bool fc_norm = false;               // "fc_norm.<i>" is a norm of feature i
  bool norm_before_residual = false;  // the residual starts as the normed features
  bool norm_output = false;           // a chained row takes the last row's output after the final norm

  int64_t num_features() const { return after_layers.empty() ? 1 : std::ssize(after_layers); }
  int64_t feature_width() const { return num_features() * target_hidden_size; }
  // Whether "fc" maps the features to the head's hidden_size; otherwise they already have this width.
  bool has_fc() const { return !after_layers.empty() || target_hidden_size != layers.hidden_size; }
};

// Accepts the configurations of SpecForge and ModelOpt (LlamaForCausalLMEagle3) and of speculators
// (Eagle3Speculator). kInvalidArgument and kDataLoss as parse_model_config(). kUnsupported names the key and
// its value: a setting of the head that the engine does not have, an unknown key of eagle_config whose value
// is not null, false, 0 or empty, or a target that the head does not fit.
Result<Eagle3Config> parse_eagle3_config(std::string_view config_json, const ModelConfig& target);
// Reads config.json from the head's folder and does the same.
Result<Eagle3Config> load_eagle3_config(const std::string& folder, const ModelConfig& target);

}  // namespace fp4moe
