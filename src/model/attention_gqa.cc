// Grouped-query attention: q, k and v projections, QK norms, rotary embedding, pages, softmax.
#include <algorithm>
#include <cmath>
#include <string>

#include "base/check.h"
#include "model/attention.h"
#include "model/rope_table.h"
#include "model/weight_loader.h"

namespace fp4moe {
namespace {

struct GqaWeights {
  // [(q + 2 kv heads) head_dim, input columns] if no projection is FP4; else q, k, v are used
  LinearLayer qkv;
  LinearLayer q, k, v;    // [heads head_dim, input columns]
  bool has_gate = false;  // behind the query rows are as many gate rows
  Buffer q_norm, k_norm;  // [head_dim] f32 or empty
  Buffer sinks;           // [query heads] f32 or empty
  Buffer inv_freq;        // [rotary_dim / 2] f32
  float rope_factor = 1;  // multiplies cos and sin
  KvScales kv_scales;
  HeadShard heads;
  int64_t window = 0;
  int head_dim = 0, rotary_dim = 0;
  float norm_eps = 0;
};

// The projections' outputs.
struct Qkv {
  float *q, *k, *v;
  int64_t q_stride, kv_stride;
};

class GqaAttention final : public Attention {
 public:
  GqaAttention(const DenseOps& ops, GqaWeights weights) : ops_(ops), w_(std::move(weights)) {}

  int64_t out_cols() const override { return q_cols(); }
  WeightBytes first_weights() const override { return w_.qkv.bytes(); }
  int64_t weight_bytes() const override {
    return w_.qkv.weight_bytes() + w_.q.weight_bytes() + w_.k.weight_bytes() + w_.v.weight_bytes();
  }
  int64_t scratch_bytes(int64_t max_tokens) const override {
    return Arena::padded(max_tokens * (q_rows() + 2 * kv_cols()) * 4) +
           std::max({w_.q.scratch_bytes(max_tokens), w_.k.scratch_bytes(max_tokens),
                     w_.v.scratch_bytes(max_tokens), attention_workspace(ops_, shape(), max_tokens)});
  }

  void forward_attention(const AttentionInput& in, Arena& scratch, ThreadPool& pool) const override {
    const int64_t t = in.norm.out_act.rows;
    const int num_q = static_cast<int>(w_.heads.query.count), num_kv = static_cast<int>(w_.heads.kv.count);
    const Qkv s = project(in.norm, scratch, pool);
    AttentionArgs args = shape();
    args.q = s.q;
    args.q_stride = s.q_stride;
    args.k_pages = in.k_pages, args.k_pages.scale = w_.kv_scales.k;
    args.v_pages = in.v_pages, args.v_pages.scale = w_.kv_scales.v;
    args.sequences = in.batch.sequences;
    args.device_batch = in.batch.device;
    args.out = in.out;
    args.workspace = scratch.take<uint8_t>(attention_workspace(ops_, args, t));
    ops_.rope_attention(
        {{turn(s.q, s.q_stride, num_q, in.batch),
          turn(s.k, s.kv_stride, num_kv, in.batch),
          {s.k, s.v, s.kv_stride, args.k_pages, args.v_pages, in.batch.sequences, in.batch.device},
          {w_.q_norm.as<float>(), w_.k_norm.as<float>(), w_.norm_eps}},
         args,
         w_.has_gate ? s.q + q_cols() : nullptr,
         s.q_stride},
        pool);
  }

 private:
  int64_t q_cols() const { return w_.heads.query.count * w_.head_dim; }
  int64_t q_rows() const { return (w_.has_gate ? 2 : 1) * q_cols(); }  // of the query projection
  int64_t kv_cols() const { return w_.heads.kv.count * w_.head_dim; }

  // The arguments that do not depend on the batch.
  AttentionArgs shape() const {
    AttentionArgs args;
    args.k_pages.num_kv_heads = static_cast<int>(w_.heads.kv.count);
    args.k_pages.head_dim = args.v_pages.head_dim = w_.head_dim;
    args.num_heads = static_cast<int>(w_.heads.query.count);
    args.scale = 1.0f / std::sqrt(static_cast<float>(w_.head_dim));
    args.window = w_.window;
    args.sinks = w_.sinks.as<float>();
    return args;
  }

  Qkv project(const RmsNormArgs& norm, Arena& scratch, ThreadPool& pool) const {
    const ActRows& x = norm.out_act;
    float* out = scratch.take<float>(x.rows * (q_rows() + 2 * kv_cols()));
    if (w_.qkv.n() > 0) {
      w_.qkv.forward_normed(norm, out, scratch, pool);
      return {out, out + q_rows(), out + q_rows() + kv_cols(), w_.qkv.n(), w_.qkv.n()};
    }
    run_norm(ops_, norm, pool);
    float* k = out + x.rows * q_rows();
    float* v = k + x.rows * kv_cols();
    w_.q.forward_linear(x, out, false, scratch, pool);
    w_.k.forward_linear(x, k, false, scratch, pool);
    w_.v.forward_linear(x, v, false, scratch, pool);
    return {out, k, v, q_rows(), kv_cols()};
  }

  RopeArgs turn(float* x, int64_t stride, int num_heads, const Batch& batch) const {
    return {x,
            batch.op_positions(),
            w_.inv_freq.as<float>(),
            w_.rope_factor,
            batch.num_rows(),
            stride,
            num_heads,
            w_.head_dim,
            w_.rotary_dim};
  }

  const DenseOps& ops_;
  const GqaWeights w_;
};

// The rows of `heads` in a projection with a gate, which has a head's query rows, then its gate rows: all
// query rows, then all gate rows.
std::vector<int64_t> gated_rows(Shard heads, int64_t head_dim) {
  std::vector<int64_t> rows;
  for (const int64_t gate : {0, 1})
    for (int64_t head = heads.first; head < heads.first + heads.count; ++head)
      for (int64_t i = 0; i < head_dim; ++i) rows.push_back((2 * head + gate) * head_dim + i);
  return rows;
}

// Loads the projections of this rank's heads.
Status load_qkv(WeightLoader& loader, const std::string& prefix, int64_t input_cols, GqaWeights& w) {
  const ModelConfig& config = loader.config();
  const int64_t d = config.head_dim;
  const auto part = [&](const char* name, int64_t num_heads, Shard heads) -> Result<LinearPart> {
    FP4MOE_ASSIGN_OR_RETURN(const LinearWeightsView view,
                            loader.view(prefix + name, {num_heads * d, input_cols, config.attention_bias}));
    return LinearPart{view, row_range(heads.first * d, heads.count * d), {}};
  };
  const int64_t num_q = config.num_heads * (w.has_gate ? 2 : 1);
  FP4MOE_ASSIGN_OR_RETURN(LinearPart q, part("q_proj", num_q, w.heads.query));
  if (w.has_gate) q.rows = gated_rows(w.heads.query, d);
  FP4MOE_ASSIGN_OR_RETURN(const LinearPart k, part("k_proj", config.num_kv_heads, w.heads.kv));
  FP4MOE_ASSIGN_OR_RETURN(const LinearPart v, part("v_proj", config.num_kv_heads, w.heads.kv));
  if (const std::vector<LinearPart> all = {q, k, v}; can_stack(all)) {
    FP4MOE_ASSIGN_OR_RETURN(w.qkv, loader.linear(all));
    return {};
  }
  FP4MOE_ASSIGN_OR_RETURN(w.q, loader.linear({q}));
  FP4MOE_ASSIGN_OR_RETURN(w.k, loader.linear({k}));
  FP4MOE_ASSIGN_OR_RETURN(w.v, loader.linear({v}));
  return {};
}

}  // namespace

Result<std::unique_ptr<Attention>> load_gqa(WeightLoader& loader, const std::string& prefix,
                                            const GqaOptions& options) {
  const ModelConfig& config = loader.config();
  const RankLayout& layout = loader.layout();
  GqaWeights w;
  w.heads = head_shard(config.num_heads, config.num_kv_heads, layout.attention_tp(), layout.attention_rank());
  w.head_dim = static_cast<int>(config.head_dim);
  w.rotary_dim = static_cast<int>(config.rotary_dim);
  const RopeTable rope = make_rope_table(config.rope, config.rotary_dim);
  w.rope_factor = rope.attention_factor;
  FP4MOE_ASSIGN_OR_RETURN(w.inv_freq, loader.put(rope.inv_freq));
  w.norm_eps = static_cast<float>(config.rms_norm_eps);
  w.has_gate = config.attention_gate;
  w.window = config.layer_windows[static_cast<size_t>(options.layer)];
  FP4MOE_RETURN_IF_ERROR(
      load_qkv(loader, prefix, options.input_cols > 0 ? options.input_cols : config.hidden_size, w));
  FP4MOE_ASSIGN_OR_RETURN(w.kv_scales, loader.kv_scales(prefix));
  if (config.qk_norm) {
    FP4MOE_ASSIGN_OR_RETURN(w.q_norm, loader.norm(prefix + "q_norm.weight", config.head_dim));
    FP4MOE_ASSIGN_OR_RETURN(w.k_norm, loader.norm(prefix + "k_norm.weight", config.head_dim));
  }
  if (options.sinks) {
    FP4MOE_ASSIGN_OR_RETURN(const std::vector<float> all, loader.vector(prefix + "sinks", config.num_heads));
    const auto first = all.begin() + static_cast<long>(w.heads.query.first);
    FP4MOE_ASSIGN_OR_RETURN(
        w.sinks, loader.put(std::vector<float>(first, first + static_cast<long>(w.heads.query.count))));
  }
  return std::unique_ptr<Attention>(std::make_unique<GqaAttention>(loader.ops(), std::move(w)));
}

}  // namespace fp4moe
