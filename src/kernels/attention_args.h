// The arguments of the ops around attention: norms of heads, rotary embedding, pages, attention, output gate.
// Conventions: kernels/ops.h.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/act_rows.h"
#include "kernels/batch.h"

namespace fp4moe {

// Rotary embedding with the two-halves layout: pairs (i, i + rotary_dim/2). YaRN and other scalings are
// already in make_rope_table()'s inv_freq and attention_factor; elements past rotary_dim are unchanged.
struct RopeArgs {
  float* x = nullptr;                  // [T, row_stride]: heads, contiguous from each row's start; in place
  const int64_t* positions = nullptr;  // [T]
  const float* inv_freq = nullptr;     // [rotary_dim / 2]
  float attention_factor = 1;          // multiplies cos and sin (YaRN's concentration)
  int64_t num_tokens = 0, row_stride = 0;
  int num_heads = 0, head_dim = 0, rotary_dim = 0;
};

struct KvWriteArgs {         // stores the new tokens' rows into their pages, rounded to the pages' type
  const float* k = nullptr;  // [T, row_stride]: num_kv_heads * k_pages.head_dim from each row's start
  const float* v = nullptr;  // the same with v_pages.head_dim; null: values are part of the keys
  int64_t row_stride = 0;
  KvPages k_pages, v_pages;
  std::span<const SequenceRows> sequences;
  const DeviceBatch* device_batch = nullptr;  // on a GPU, instead of sequences
};

// RMS norms of each head of the queries and of the keys (HeadNormArgs). q and k are both null: no norms.
struct QkNorm {
  const float *q = nullptr, *k = nullptr;  // [head_dim]
  float eps = 0;
};

// The norms, rope of q and k, then kv_write. k's rows are unspecified afterwards. kv.k is k.x; q and k have
// the same positions, inv_freq, rotary_dim and head_dim.
struct RopeKvArgs {
  RopeArgs q, k;
  KvWriteArgs kv;
  QkNorm norm;
};

struct AttentionArgs {  // causal, grouped-query; the new tokens' keys and values are already in the pages
  const float* q = nullptr;  // [T, q_stride]: num_heads * k_pages.head_dim from each row's start
  int64_t q_stride = 0;
  KvPages k_pages, v_pages;
  std::span<const SequenceRows> sequences;
  int num_heads = 0;             // a multiple of num_kv_heads
  float scale = 0;               // multiplies q . k
  int64_t window = 0;            // 0: all; w: positions p - w < j <= p
  const float* sinks = nullptr;  // [num_heads] or null: logit added only to the softmax's denominator
  ActRows out;                   // [T, num_heads * v_pages.head_dim]
  const DeviceBatch* device_batch = nullptr;  // on a GPU, instead of sequences
  uint8_t* workspace = nullptr;               // on a GPU: attention_workspace_bytes() bytes
};

// RopeKvArgs, then attention with the queries rope.q.x over the pages that were written. q's rows are
// unspecified afterwards (a GPU may rotate q inside the attention).
struct RopeAttentionArgs {
  RopeKvArgs rope;
  AttentionArgs attention;
  // Output gate, or null: out[t, h] *= sigmoid(gate[t, h]), rounded as by MulSigmoidArgs.
  const float* gate = nullptr;  // [T, gate_stride]: heads, contiguous from each row's start
  int64_t gate_stride = 0;
};

// RMS norm of each head's slice of a row, in place, f32 (QK norms; with one head: MLA's latent).
struct HeadNormArgs {
  float* x = nullptr;             // [T, row_stride]: heads, contiguous from each row's start
  const float* weight = nullptr;  // [head_dim]
  float eps = 0;
  int64_t num_tokens = 0, row_stride = 0;
  int num_heads = 0, head_dim = 0;
};

// MLA's rows between their projections and attention: the norm of the keys' latents, rope of keys and
// queries, and kv_write of the keys. The keys' rows are unspecified afterwards, and those of the queries if
// they have a copy.
struct LatentRopeArgs {
  RopeArgs q;  // the rotary parts, head_dim elements apart
  // Where the rotated parts go, head h of row t at q_out + t * q_out_stride + h * q_out_head_stride; null: in
  // place.
  float* q_out = nullptr;
  int64_t q_out_stride = 0, q_out_head_stride = 0;
  HeadNormArgs latents;  // one head
  RopeArgs k;            // one head, in the same rows: k.x = latents.x + latents.head_dim
  KvWriteArgs kv;        // kv.k = latents.x, kv.v = null
};

// x[t, h] *= sigmoid(gate[t, h]) in f32, then rounded to x's dtype (attention's output gate).
struct MulSigmoidArgs {
  ActRows x;                    // [T, num_heads * head_dim], in place
  const float* gate = nullptr;  // row t, head h starts at gate + t * gate_stride + h * gate_head_stride
  int64_t gate_stride = 0, gate_head_stride = 0;
  int num_heads = 0, head_dim = 0;
};

// The parts of RopeAttentionArgs as ops of their own.
inline HeadNormArgs head_norm_args(const RopeArgs& heads, const float* weight, float eps) {
  return {heads.x, weight, eps, heads.num_tokens, heads.row_stride, heads.num_heads, heads.head_dim};
}
inline MulSigmoidArgs output_gate_args(const RopeAttentionArgs& args) {
  const int head_dim = args.attention.v_pages.head_dim;
  return {args.attention.out, args.gate, args.gate_stride, head_dim, args.attention.num_heads, head_dim};
}

}  // namespace fp4moe
