// The tensors of a checkpoint that the model does not read, determined from names alone for the whole model,
// so that every rank gets the same result before it reads a weight.
#pragma once

#include <string>
#include <vector>

#include "io/checkpoint/checkpoint.h"
#include "io/config/model_config.h"

namespace fp4moe {

struct UnusedTensors {
  // Below "model." or "lm_head.", where each tensor changes the model's output: a bias that config.json
  // denies, a layer that it does not count, a scale that nothing applies.
  std::vector<const TensorEntry*> in_model;
  // Anywhere else, such as a vision tower: the language model is complete without them.
  std::vector<const TensorEntry*> elsewhere;
};

// In the checkpoint's order. Tensors known not to matter are omitted:
// * "*.rotary_emb.inv_freq": a function of the configuration;
// * scales of a quantised KV cache ("*.k_scale", "*.k_proj.k_scale" and so on, below self_attn): pages here
//   hold bf16 or float32;
// * multi-token prediction layers (mtp_layers.h), which are logged when a model is loaded;
// * an lm_head.weight beside tie_word_embeddings that equals the embedding byte for byte.
UnusedTensors find_unused_tensors(const Checkpoint& checkpoint, const ModelConfig& config);

// One line about `tensors` (not empty): their number, the first names, and the key of config.json that the
// first one contradicts.
std::string describe_unused_tensors(const std::vector<const TensorEntry*>& tensors,
                                    const ModelConfig& config);

// kUnsupported with that line if tensors of the model are unused and `allow` is false; with `allow` they are
// logged as a warning. Tensors elsewhere are always logged as a warning. FP4 tensors without a
// declaration are always refused. Also logs skipped multi-token prediction layers.
Status check_unused_tensors(const Checkpoint& checkpoint, const ModelConfig& config, bool allow);

}  // namespace fp4moe
