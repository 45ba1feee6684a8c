// The smallest checkpoint with every part of a shape.
#pragma once

#include <string>

#include "io/write/make_tiny.h"

namespace fp4moe {

inline MakeTinyOptions small_model(const std::string& like) {
  MakeTinyOptions options;
  options.like = like;
  options.num_hidden_layers = 2;
  options.hidden_size = 96;
  options.intermediate_size = 64;
  options.num_experts = 4;
  options.top_k = 2;
  options.num_heads = 4;
  options.num_kv_heads = 2;
  options.vocab_size = 300;
  if (!like.starts_with("gpt-oss") && !like.starts_with("qwen")) {
    options.dense_intermediate_size = 128;
    options.num_dense_layers = 1;
    options.num_groups = 2;
    options.top_k_groups = 1;
  }
  return options;
}

}  // namespace fp4moe
