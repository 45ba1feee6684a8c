// The runners of bf16 experts. They run a dense linear op, the CPU's or the reference's, on one expert after
// another. The first serves checkpoints that are not quantised, and records the largest activations when
// `fp4moe quantize` calibrates.
#include <algorithm>
#include <cmath>
#include <string>

#include "base/check.h"
#include "moe/local_experts.h"
#include "moe/table.h"

namespace fp4moe {
namespace {

constexpr int64_t kRowsAtATime = 256;  // bounds the scratch memory

const DenseOps& ops_of(const RunnerRow& row, const MoeProblem& p) {
  return row.ops == ref_expert_ops ? ref_dense_ops() : cpu_dense_ops(p.isa);
}

int64_t matrices(const MoeProblem& p) { return is_gated(p.activation.kind) ? 2 : 1; }

// Writes matrices as row-major bf16, one after another.
struct Rows {
  bf16* at;
  void append(const Bf16MatrixView& m) {
    for (int64_t r = 0; r < m.rows; ++r)
      for (int64_t c = 0; c < m.cols; ++c) *at++ = m.data[r * m.row_stride + c * m.col_stride];
  }
};

void append_bias(const bf16* bias, int64_t stride, int64_t count, std::vector<float>& to) {
  for (int64_t i = 0; i < count; ++i) to.push_back(bias == nullptr ? 0.0f : bf16_to_float(bias[i * stride]));
}

float activate(const Activation& act, float gate, float up) {
  switch (act.kind) {
    case ActivationKind::kSwigluOai: {
      const float g = std::min(gate, act.limit), u = std::clamp(up, -act.limit, act.limit);
      return g / (1 + std::exp(-act.alpha * g)) * (u + act.beta);
    }
    case ActivationKind::kSilu:
      return gate / (1 + std::exp(-gate)) * up;
    case ActivationKind::kRelu2:
      return up < 0 ? 0 : up * up;
  }
  return 0;
}

// A range of one expert's rows.
struct Piece {
  int64_t expert, first_row, num_rows;
};

class ExpertPass {
 public:
  ExpertPass(const RunnerArgs& args, const DenseOps& ops, Arena& scratch, ThreadPool& pool)
      : args_(args), p_(args.problem), ops_(ops), pool_(pool), cols_(p_.local_intermediate().count) {
    gate_up_ = scratch.take<float>(kRowsAtATime * matrices(p_) * cols_);
    h_ = scratch.take<uint8_t>(kRowsAtATime * cols_ * dtype_bits(p_.act_dtype) / 8);
  }

  void run(const Piece& piece) const {
    const ExpertBatch& batch = args_.batch;
    const int64_t n = matrices(p_) * cols_, hidden = p_.hidden_size;
    const int64_t row_bytes = hidden * dtype_bits(batch.x.dtype) / 8;
    const ActRows x = {static_cast<uint8_t*>(batch.x.data) + piece.first_row * row_bytes, batch.x.dtype,
                       piece.num_rows, hidden};
    const ActRows h = {h_, p_.act_dtype, piece.num_rows, cols_};
    const PackedExperts& w = args_.experts;
    const uint8_t* gate_up = w.gate_up.data() + piece.expert * weight_bytes(n, hidden);
    const uint8_t* down = w.down.data() + piece.expert * weight_bytes(hidden, cols_);
    ops_.linear({.x = x, .weight = gate_up, .out = gate_up_, .n = n}, pool_);
    pool_.run(piece.num_rows, [&](int64_t row, int) { activate_row(piece, row, h); });
    ops_.linear({.x = h,
                 .weight = down,
                 .bias = w.down_bias.data() + piece.expert * hidden,
                 .out = batch.y + piece.first_row * hidden,
                 .n = hidden},
                pool_);
    if (w.amax == nullptr) return;
    take_amax(x, w.amax->input[static_cast<size_t>(piece.expert)]);
    take_amax(h, w.amax->intermediate[static_cast<size_t>(piece.expert)]);
  }

 private:
  int64_t weight_bytes(int64_t n, int64_t k) const { return linear_weight_bytes(n, k, ops_.linear_layout); }

  void activate_row(const Piece& piece, int64_t row, const ActRows& h) const {
    const float* sums = gate_up_ + row * matrices(p_) * cols_;
    const float* bias = args_.experts.gate_up_bias.data() + piece.expert * matrices(p_) * cols_;
    const float* scales = args_.batch.x_row_scales;
    const float scale = scales == nullptr ? 1 : scales[piece.first_row + row];
    const int64_t up = (matrices(p_) - 1) * cols_;
    for (int64_t i = 0; i < cols_; ++i) {
      const float y = activate(p_.activation, sums[i] * scale + bias[i], sums[up + i] * scale + bias[up + i]);
      if (h.dtype == DType::kF32)
        static_cast<float*>(h.data)[row * cols_ + i] = y;
      else
        static_cast<bf16*>(h.data)[row * cols_ + i] = float_to_bf16(y);
    }
  }

  const RunnerArgs& args_;
  const MoeProblem& p_;
  const DenseOps& ops_;
  ThreadPool& pool_;
  const int64_t cols_;  // this rank's part of I
  float* gate_up_;      // [kRowsAtATime, gate and up]
  uint8_t* h_;          // [kRowsAtATime, cols_] of the activations' type
};

}  // namespace

Result<PackedExperts> bf16_pack(const RunnerRow& row, const MoeProblem& p, const Numerics& numerics,
                                const MoeWeightsView& weights, ThreadPool& pool) {
  FP4MOE_ASSIGN_OR_RETURN(const std::vector<Bf16ExpertView> experts, local_bf16_experts(p, weights));
  const int64_t count = std::ssize(experts), inter = p.local_intermediate().count;
  const DenseOps& ops = ops_of(row, p);
  PackedExperts packed;
  packed.numerics = numerics;
  packed.amax = new_amax(count);
  const int64_t n = matrices(p) * inter;
  const LinearSource gate_up = [&](Buffer& storage) -> Result<const bf16*> {
    FP4MOE_ASSIGN_OR_RETURN(storage, Buffer::make(count * n * p.hidden_size * int64_t{sizeof(bf16)}));
    Rows rows{storage.as<bf16>()};
    for (const Bf16ExpertView& e : experts) {
      if (is_gated(p.activation.kind)) rows.append(e.gate);
      rows.append(e.up);
    }
    return storage.as<bf16>();
  };
  const LinearSource down = [&](Buffer& storage) -> Result<const bf16*> {
    FP4MOE_ASSIGN_OR_RETURN(storage, Buffer::make(count * p.hidden_size * inter * int64_t{sizeof(bf16)}));
    Rows rows{storage.as<bf16>()};
    for (const Bf16ExpertView& e : experts) rows.append(e.down);
    return storage.as<bf16>();
  };
  FP4MOE_ASSIGN_OR_RETURN(packed.gate_up, put_linear_weight(gate_up, count * n, p.hidden_size, ops, pool));
  FP4MOE_ASSIGN_OR_RETURN(packed.down, put_linear_weight(down, count * p.hidden_size, inter, ops, pool));
  for (const Bf16ExpertView& e : experts) {
    if (is_gated(p.activation.kind))
      append_bias(e.gate_bias, e.gate_up_bias_stride, inter, packed.gate_up_bias);
    append_bias(e.up_bias, e.gate_up_bias_stride, inter, packed.gate_up_bias);
    append_bias(e.down_bias, 1, p.hidden_size, packed.down_bias);
  }
  return packed;
}

int64_t bf16_scratch_bytes(const MoeProblem& p, const Numerics&, int64_t) {
  const int64_t cols = p.local_intermediate().count;
  return Arena::padded(kRowsAtATime * matrices(p) * cols * 4) +
         Arena::padded(kRowsAtATime * cols * dtype_bits(p.act_dtype) / 8);
}

void bf16_run(const RunnerRow& row, const RunnerArgs& args, Arena& scratch, ThreadPool& pool) {
  const ExpertPass pass(args, ops_of(row, args.problem), scratch, pool);
  const ExpertBatch& batch = args.batch;
  for (int64_t e = 0; e < batch.num_experts; ++e)
    for (int64_t i = 0; i < batch.num_rows(e); i += kRowsAtATime)
      pass.run({e, batch.first_row(e) + i, std::min(kRowsAtATime, batch.num_rows(e) - i)});
}

}  // namespace fp4moe
