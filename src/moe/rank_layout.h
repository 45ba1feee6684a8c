// Which part of the model a rank has: pure arithmetic, the same on every rank.
#pragma once

#include <cstdint>

namespace fp4moe {

// [first, first + count) of something that is shared out.
struct Shard {
  int64_t first = 0, count = 0;
};

// Part `index` of `parts` of `total`, cut in whole blocks as evenly as they go: the first parts have one
// block more. 2880 in blocks of 32 over 4: 736, 736, 704, 704.
constexpr Shard shard_blocks(int64_t total, int64_t block, int64_t parts, int64_t index) {
  const int64_t blocks = total / block, each = blocks / parts, more = blocks % parts;
  const int64_t first = index * each + (index < more ? index : more);
  return {first * block, (each + (index < more ? 1 : 0)) * block};
}

// Part `index` of `parts` of a linear layer's outputs: whole panels of 16 as far as they go, so that a shard
// has the panels, and with them the bits, of the whole layer.
constexpr Shard output_shard(int64_t outputs, int64_t parts, int64_t index) {
  constexpr int64_t kPanel = 16;
  const Shard panels = shard_blocks((outputs + kPanel - 1) / kPanel, 1, parts, index);
  const int64_t first = panels.first * kPanel < outputs ? panels.first * kPanel : outputs;
  const int64_t end = (panels.first + panels.count) * kPanel;
  return {first, (end < outputs ? end : outputs) - first};
}

// tp ranks in all, in dp groups of tp / dp consecutive ones: a group shares the attention of its own requests
// by heads. Experts: ep = 1: each rank has a shard (along I) of every expert; ep = tp: whole experts, E / tp
// consecutive ones.
struct RankLayout {
  int tp = 1, ep = 1, dp = 1, rank = 0;

  constexpr int attention_tp() const { return tp / dp; }
  constexpr int attention_rank() const { return rank % attention_tp(); }
  constexpr int dp_rank() const { return rank / attention_tp(); }
  constexpr int moe_tp() const { return ep == 1 ? tp : 1; }
  constexpr int moe_tp_rank() const { return ep == 1 ? rank : 0; }
  constexpr int ep_rank() const { return ep == 1 ? 0 : rank; }
};

// Query heads of an attention rank and the KV heads that they read. Fewer KV heads than ranks: each is on
// several ranks.
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
