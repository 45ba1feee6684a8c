// Finds the tensors of a checkpoint that the model does not read. Goes by names and dtypes (and by data for a
// tied lm_head) in the whole model, so that every rank gets the same result before it loads weights.
#pragma once

#include <string>
#include <vector>

#include "io/checkpoint/checkpoint.h"
#include "io/config/model_config.h"

namespace fp4moe {

struct UnusedTensors {
  // Below "model." or "lm_head.", where each tensor changes the model's output: a bias that config.json
  // disables, a layer with an index of num_hidden_layers or more, a scale that is not applied.
  std::vector<const TensorEntry*> in_model;
  // Anywhere else, such as a vision tower: the language model is complete without these tensors.
  std::vector<const TensorEntry*> elsewhere;
};

// Returns the unused tensors in the checkpoint's order, except for those that are known not to matter:
// * "*.rotary_emb.inv_freq": a function of the configuration;
// * scales of a quantised KV cache ("*.k_scale", "*.k_proj.k_scale" and so on, below self_attn): this
//   engine's pages hold bf16 or float32;
// * multi-token prediction layers (mtp_layers.h; with loads_mtp, only their copies) and, if the text model is
// part of a larger model, the vision
//   model (is_vision_name()), which are logged when a model is loaded;
// * with tie_word_embeddings, an lm_head.weight that equals the embedding byte for byte.
UnusedTensors find_unused_tensors(const Checkpoint& checkpoint, const ModelConfig& config,
                                  bool loads_mtp = false);

// Returns one line about `tensors` (not empty): their number, the first names, and the key of config.json
// that the first tensor contradicts.
std::string describe_unused_tensors(const std::vector<const TensorEntry*>& tensors,
                                    const ModelConfig& config);

// kUnsupported, with that line, if tensors of the model are unused and `allow` is false; if `allow` is true,
// logs the line as a warning. Always logs unused tensors elsewhere as a warning, and refuses FP4 tensors
// without a declaration. Also logs skipped multi-token prediction layers and vision models, one line each.
Status check_unused_tensors(const Checkpoint& checkpoint, const ModelConfig& config, bool allow,
                            bool loads_mtp = false);

}  // namespace fp4moe
