// Random inputs of a gated delta net.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/dense_case.h"

namespace fp4moe {

struct Dims {
  int key_heads, value_heads, dk, dv;
};

// The slots of a layer, filled with NaN: a state that is read before it was written poisons the outputs.
struct Slots {
  std::vector<float> recurrent, conv, replay;
};

// The inputs of T rows, with gaps after each row.
struct DeltaCase {
  Dims dims;
  int64_t tokens;
  int width;
  int64_t gap = 3;  // floats between rows of qkv
  std::vector<float> qkv, z, ba, conv_weight, decay, dt_bias, norm_weight;

  // decay_factor multiplies g: 1e-7 keeps nearly all of the state, 100 nearly nothing.
  DeltaCase(Dims d, int64_t t, float decay_factor = 1, int conv_width = 4)
      : dims(d), tokens(t), width(conv_width) {
    Random random(static_cast<uint64_t>(d.dk * 1000 + d.dv));
    qkv = random.normal(t * qkv_stride()), z = random.normal(t * (columns() + 5));
    ba = random.normal(t * ba_stride(), 2);
    conv_weight = random.normal(channels() * width);
    for (float x : random.normal(d.value_heads)) decay.push_back(-decay_factor * std::exp(x));
    dt_bias = random.normal(d.value_heads), norm_weight = random.normal(d.dv);
  }
  int64_t channels() const { return int64_t{2} * dims.key_heads * dims.dk + columns(); }
  int64_t qkv_stride() const { return channels() + gap; }
  int64_t columns() const { return int64_t{dims.value_heads} * dims.dv; }
  int64_t ba_stride() const { return int64_t{2} * dims.value_heads + 1; }
  int64_t state_size() const { return int64_t{dims.value_heads} * dims.dk * dims.dv; }

  int64_t replay_size() const { return channels() + int64_t{2} * dims.value_heads; }

  Slots slots(int64_t n, int64_t num_replay_rows = 0) const {
    const auto nans = [](int64_t count) {
      return std::vector<float>(static_cast<size_t>(count), std::numeric_limits<float>::quiet_NaN());
    };
    return {nans(n * state_size()), nans(n * channels() * (width - 1)),
            nans(n * num_replay_rows * replay_size())};
  }

  static constexpr float kEps = 1e-6f;
  GatedDeltaArgs args(Slots& s, const ActRows& out) const {
    const int64_t num_slots = static_cast<int64_t>(s.recurrent.size()) / state_size();
    return {.qkv = qkv.data(),
            .z = z.data(),
            .b = ba.data(),
            .a = ba.data() + dims.value_heads,
            .qkv_stride = qkv_stride(),
            .z_stride = columns() + 5,
            .ba_stride = ba_stride(),
            .conv_weight = conv_weight.data(),
            .decay = decay.data(),
            .dt_bias = dt_bias.data(),
            .norm_weight = norm_weight.data(),
            .eps = kEps,
            .num_key_heads = dims.key_heads,
            .num_value_heads = dims.value_heads,
            .key_head_dim = dims.dk,
            .value_head_dim = dims.dv,
            .conv_width = width,
            .slots = {s.recurrent.data(), s.conv.data(), num_slots, s.replay.data(),
                      static_cast<int64_t>(s.replay.size()) / (num_slots * replay_size())},
            .out = out};
  }
  // Runs the sequences' rows in one call; out has all T rows.
  void run(const DenseOps& ops, const std::vector<SequenceRows>& sequences, Slots& s, ActBuffer& out,
           ThreadPool& pool) const {
    GatedDeltaArgs a = args(s, out.view());
    a.sequences = sequences;
    ops.gated_delta(a, pool);
  }
};

}  // namespace fp4moe
