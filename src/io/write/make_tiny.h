// Writes random checkpoints in the published dialects, with the published shapes or smaller ones, for tests
// and benchmarks that need a model's structure but not its output.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

// Large because each size of a model has an override.
struct MakeTinyOptions {
  std::string like = "gpt-oss-tiny";  // one of make_tiny_shapes()
  // auto | gpt-oss | modelopt | compressed-nvfp4 | compressed-mxfp4 | bf16 (not quantised); must be one that
  // the family supports.
  std::string dialect = "auto";
  std::string rope_style = "new";  // new: rope_parameters; old: rope_theta and rope_scaling
  std::string tokenizer = "json";  // json: tokenizer.json; tiktoken: tiktoken.model
  uint64_t seed = 0;               // a tensor's data depends only on the seed, its name and its shape
  int num_shards = 1;
  // These override the sizes of `like`.
  std::optional<int64_t> num_hidden_layers, hidden_size, intermediate_size /* of one expert */, num_experts,
      top_k;
  std::optional<int64_t> num_heads, num_kv_heads, head_dim, vocab_size, sliding_window,
      max_position_embeddings;
  std::optional<int64_t> dense_intermediate_size, num_dense_layers, num_groups, top_k_groups;  // DeepSeek
  // DeepSeek: layers for multi-token prediction; 0 by default. modelopt leaves them in bf16, as NVIDIA's
  // exports do.
  std::optional<int64_t> num_mtp_layers;
};

std::vector<std::string> make_tiny_shapes();

// Writes config.json, generation_config.json, tokenizer.json or tiktoken.model, tokenizer_config.json,
// hf_quant_config.json (modelopt) and the tensors into `folder`, which must be absent or empty; config.json
// is written last. Memory use: one piece of 1 MiB. tokenizer.json has 259 tokens (3 special tokens, then the
// 256 bytes) and tiktoken.model has 512 (the 256 bytes, then 3 named and 253 reserved special tokens),
// whatever vocab_size is. kInvalidArgument or kUnsupported: parse_model_config rejects the sizes;
// kDoesNotFit: the disk is too small.
Status make_tiny(const std::string& folder, const MakeTinyOptions& options);

}  // namespace fp4moe
