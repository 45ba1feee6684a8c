// Which part of the model each rank has: pure arithmetic, the same on every rank.
#pragma once

#include <cstdint>

namespace fp4moe {

// The range [first, first + count) of a dimension that is split among ranks.
struct Shard {
  int64_t first = 0, count = 0;
};

// Part `index` of `total` split into `parts`, in whole blocks and as evenly as possible: the first parts may
// have one block more. Example: 2880 in blocks of 64, split into 4 parts, gives 768, 704, 704, 704.
constexpr Shard shard_blocks(int64_t total, int64_t block, int64_t parts, int64_t index) {
  const int64_t blocks = total / block, each = blocks / parts, more = blocks % parts;
  const int64_t first = index * each + (index < more ? index : more);
  return {first * block, (each + (index < more ? 1 : 0)) * block};
}

// Part `index` of a linear layer's outputs split into `parts`, in whole panels of 16 (the last may be short),
// so that a shard has the same panels, and therefore the same bits, as the whole layer.
constexpr Shard output_shard(int64_t outputs, int64_t parts, int64_t index) {
  constexpr int64_t kPanel = 16;
  const Shard panels = shard_blocks((outputs + kPanel - 1) / kPanel, 1, parts, index);
  const int64_t first = panels.first * kPanel < outputs ? panels.first * kPanel : outputs;
  const int64_t end = (panels.first + panels.count) * kPanel;
  return {first, (end < outputs ? end : outputs) - first};
}

// tp ranks in total, in dp groups of tp / dp consecutive ranks; a group splits the attention of its requests
// by heads. ep = 1: each rank has a shard (along I) of every expert; ep = tp: each rank has E / tp
// consecutive whole experts.
struct RankLayout {
  int tp = 1, ep = 1, dp = 1, rank = 0;

  constexpr int attention_tp() const { return tp / dp; }
  constexpr int attention_rank() const { return rank % attention_tp(); }
  constexpr int dp_rank() const { return rank / attention_tp(); }
  constexpr int moe_tp() const { return ep == 1 ? tp : 1; }
  constexpr int moe_tp_rank() const { return ep == 1 ? rank : 0; }
  constexpr int ep_rank() const { return ep == 1 ? 0 : rank; }
};

// Query heads of an attention rank and the KV heads that they read. If there are fewer KV heads than ranks,
// each is replicated on several ranks.
struct HeadShard {
  Shard query, kv;
};
constexpr HeadShard head_shard(int64_t num_heads, int64_t num_kv_heads, int parts, int index) {
  const int64_t q = num_heads / parts;
  if (num_kv_heads % parts == 0)
    return {{index * q, q}, {index * (num_kv_heads / parts), num_kv_heads / parts}};
  return {{index * q, q}, {index * q / (num_heads / num_kv_heads), 1}};
}

}  // namespace fp4moe
