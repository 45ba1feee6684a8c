// Arguments of the gated delta net (DenseOps::gated_delta): a linear attention whose layers keep a state of
// fixed size for each sequence.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/act_rows.h"
#include "kernels/batch.h"

namespace fp4moe {

constexpr int kMaxDeltaHeadDim = 256, kMaxConvWidth = 8;
constexpr int kMaxReplayRows = 16;      // drafts of a sequence in one pass
constexpr int kMaxDeltaCluster = 8;     // on a GPU: value heads of a key head
constexpr float kDeltaNormEps = 1e-6f;  // added to the sum of squares in the L2 norms of q and k

// Gated delta net between its input projections and its output projection: convolution over time and SiLU, L2
// norms of q and k, gates, recurrence, RMS norm and SiLU gate. Dims: Hk key heads, Hv value heads (a multiple
// of Hk; value head h uses key head h / (Hv / Hk)), dk and dv elements per head, C = 2 Hk dk + Hv dv
// channels. All in f32 and token by token, except that a GPU runs long prompts in chunks
// (kernels/cuda/dense/gated_delta_chunks.h):
//
//   c[ch] = silu(sum_i conv_weight[ch, i] u[t - conv_width + 1 + i, ch])      u = qkv; 0 before the sequence
//   q = c_q / sqrt(sum c_q^2 + kDeltaNormEps) / sqrt(dk);   k = c_k / sqrt(sum c_k^2 + kDeltaNormEps);   v =
//   c_v g = exp(decay * softplus(a + dt_bias));   S <- g S;   S <- S + k (sigmoid(b) (v - k^T S))^T o = q^T
//   S;   out = o / sqrt(mean(o^2) + eps) * norm_weight * silu(z)
//
// Sequences with rows have different slots, or share slot 0, whose contents are unspecified. A sequence
// without rows leaves its slot unchanged. Row numbers below are those of a sequence: its new rows from 0 on,
// and negative ones for the replayed rows before them (StateSlots), which have no outputs.
//
// Large because one op takes the inputs and weights of every step between two projections.
struct GatedDeltaArgs {
  const float* qkv = nullptr;  // [T, qkv_stride]: C channels: all q heads, all k heads, all v heads
  const float* z = nullptr;    // [T, z_stride]: Hv * dv
  const float* b = nullptr;    // [T, ba_stride]: Hv
  const float* a = nullptr;    // [T, ba_stride]: Hv
  int64_t qkv_stride = 0, z_stride = 0, ba_stride = 0;
  const float* conv_weight = nullptr;  // [C, conv_width], oldest tap first
  const float* decay = nullptr;        // [Hv]: -exp(A_log)
  const float* dt_bias = nullptr;      // [Hv]
  const float* norm_weight = nullptr;  // [dv], used as it is
  float eps = 0;                       // of the RMS norm
  int num_key_heads = 0, num_value_heads = 0;
  int key_head_dim = 0, value_head_dim = 0;  // at most kMaxDeltaHeadDim
  int conv_width = 0;                        // 1 .. kMaxConvWidth
  StateSlots slots;
  std::span<const SequenceRows> sequences;
  const DeviceBatch* device_batch = nullptr;  // on a GPU, instead of sequences
  ActRows out;                                // [T, Hv * dv]
  uint8_t* workspace = nullptr;               // gated_delta_workspace_bytes() bytes

  // Always inlined: sources of every ISA use them.
  [[gnu::always_inline]] constexpr int64_t conv_channels() const {
    return int64_t{2} * num_key_heads * key_head_dim + int64_t{num_value_heads} * value_head_dim;
  }
  // The slot's state of a value head, [dk, dv].
  [[gnu::always_inline]] constexpr float* recurrent(int32_t slot, int head) const {
    return slots.recurrent +
           (int64_t{slot} * num_value_heads + head) * int64_t{key_head_dim} * value_head_dim;
  }
  // The slot's conv inputs, [C, conv_width - 1].
  [[gnu::always_inline]] constexpr float* conv(int32_t slot) const {
    return slots.conv + slot * conv_channels() * (conv_width - 1);
  }
  // The slot's replay row: [C + 2 Hv].
  [[gnu::always_inline]] constexpr int64_t replay_columns() const {
    return conv_channels() + int64_t{2} * num_value_heads;
  }
  [[gnu::always_inline]] constexpr float* replay(int32_t slot, int64_t row) const {
    return slots.replay + (slot * slots.num_replay_rows + row) * replay_columns();
  }
  // Inputs of a row: u [C], and b and a [Hv].
  [[gnu::always_inline]] constexpr const float* qkv_of(const SequenceRows& s, int64_t row) const {
    return row < 0 ? replay(s.slot, s.num_replayed + row) : qkv + (s.first_row + row) * qkv_stride;
  }
  [[gnu::always_inline]] constexpr const float* b_of(const SequenceRows& s, int64_t row) const {
    return row < 0 ? qkv_of(s, row) + conv_channels() : b + (s.first_row + row) * ba_stride;
  }
  [[gnu::always_inline]] constexpr const float* a_of(const SequenceRows& s, int64_t row) const {
    return row < 0 ? b_of(s, row) + num_value_heads : a + (s.first_row + row) * ba_stride;
  }
};

}  // namespace fp4moe
