// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). A token's page row is [latent, rotary key],
// shared by all heads. The up-projections of keys and values are absorbed: queries are projected into the
// latent space, attend to the latents, and each head's output is projected back to its values.
#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/weight_store.h"
#include "model/attention.h"
#include "model/rope_table.h"
#include "model/weight_loader.h"

namespace fp4moe {
namespace {

// Latent queries and outputs are wide, heads * (latent + rope), so a CPU processes at most this many rows at
// a time.
constexpr int64_t kRowsPerPass = 256;
// Hugging Face's implementation uses the default eps for the latents' norms and ignores rms_norm_eps.
constexpr float kLatentNormEps = 1e-6f;

struct MlaSizes {
  int64_t heads = 0;  // of this rank
  int64_t latent = 0, nope = 0, rope = 0, value = 0, q_lora = 0;

  int64_t query() const { return nope + rope; }
  int64_t key() const { return latent + rope; }  // a page row
};

struct MlaWeights {
  MlaSizes sizes;
  LinearLayer q_a;   // [q_lora, H]; empty if queries are not compressed
  Buffer q_norm;     // [q_lora] f32
  LinearLayer q_b;   // [heads * query, q_lora or H]
  LinearLayer kv_a;  // [latent + rope, H]
  Buffer kv_norm;    // [latent] f32
  // In the ops' layout: [latent, nope] of each head; from byte value_up on, [value, latent] of each head.
  Buffer up;
  int64_t value_up = 0;
  float up_scale = 1;     // tensor scale of both parts of `up`, if the checkpoint has an FP4 or FP8 matrix
  Buffer inv_freq;        // [rope / 2] f32
  float rope_factor = 1;  // multiplies cos and sin
  float scale = 0;        // softmax scale
  float kv_scale = 1;     // of a page row, which is key and value: the checkpoint's scale of the keys
};

class MlaAttention final : public Attention {
 public:
  MlaAttention(const DenseOps& ops, MlaWeights weights) : ops_(ops), w_(std::move(weights)), s_(w_.sizes) {}

  int64_t out_cols() const override { return s_.heads * s_.value; }
  int64_t weight_bytes() const override {
    return w_.q_a.weight_bytes() + w_.q_b.weight_bytes() + w_.kv_a.weight_bytes() + w_.up.num_bytes();
  }
  int64_t scratch_bytes(int64_t max_tokens) const override {
    const int64_t pass = std::min(max_tokens, rows_per_pass());
    const int64_t linears = std::max({w_.q_a.scratch_bytes(max_tokens), w_.q_b.scratch_bytes(max_tokens),
                                      w_.kv_a.scratch_bytes(max_tokens)});
    const int64_t latents = Arena::padded(pass * s_.heads * s_.key() * 4) +
                            Arena::padded(pass * s_.heads * s_.latent * 4) +
                            attention_workspace(ops_, shape(), pass);
    return Arena::padded(max_tokens * s_.heads * s_.query() * 4) + Arena::padded(max_tokens * s_.key() * 4) +
           2 * Arena::padded(max_tokens * s_.q_lora * 4) + std::max(linears, latents);
  }

  void forward_attention(const AttentionInput& in, Arena& scratch, ThreadPool& pool) const override {
    const int64_t t = in.norm.out_act.rows;
    float* keys = scratch.take<float>(t * s_.key());
    float* q = scratch.take<float>(t * s_.heads * s_.query());
    project(in.norm, keys, q, scratch, pool);
    const RopeArgs rotary{keys + s_.latent,
                          in.batch.op_positions(),
                          w_.inv_freq.as<float>(),
                          w_.rope_factor,
                          t,
                          s_.key(),
                          1,
                          static_cast<int>(s_.rope),
                          static_cast<int>(s_.rope)};
    LatentRopeArgs rope;
    rope.k = rope.q = rotary;
    rope.q.x = q + s_.nope, rope.q.row_stride = s_.heads * s_.query();
    rope.q.num_heads = static_cast<int>(s_.heads), rope.q.head_dim = static_cast<int>(s_.query());
    rope.latents = {keys, w_.kv_norm.as<float>(),     kLatentNormEps, t, s_.key(),
                    1,    static_cast<int>(s_.latent)};
    rope.kv = {keys,           nullptr, s_.key(), scaled(in.k_pages), scaled(in.v_pages), in.batch.sequences,
               in.batch.device};
    if (t <= rows_per_pass()) {
      // The rotated parts go where attention reads them.
      Pass all{q, scratch.take<float>(t * s_.heads * s_.key()), in.batch.sequences};
      rope.q_out = all.wide + s_.latent;
      rope.q_out_stride = s_.heads * s_.key(), rope.q_out_head_stride = s_.key();
      ops_.latent_rope(rope, pool);
      return attend(in, {0, t}, all, scratch, pool);
    }
    ops_.latent_rope(rope, pool);
    std::vector<SequenceRows> sequences(in.batch.sequences.size());
    for (int64_t first = 0; first < t; first += rows_per_pass()) {
      const Shard rows = {first, std::min(rows_per_pass(), t - first)};
      const int64_t mark = scratch.used_bytes();
      const int64_t stride = s_.heads * s_.query();
      const Pass pass{q + first * stride, scratch.take<float>(rows.count * s_.heads * s_.key()),
                      cut(in.batch, rows, sequences.data())};
      ops_.copy_heads({pass.q + s_.nope, stride, s_.query(), pass.wide + s_.latent, s_.heads * s_.key(),
                       s_.key(), rows.count, s_.rope, static_cast<int>(s_.heads)},
                      pool);
      attend(in, rows, pass, scratch, pool);
      scratch.rewind(mark);
    }
  }

 private:
  using Outputs = std::array<LinearLayer::Output, 2>;
  // Computes keys [T, latent + rope] and queries [T, heads * query], without norms of latents and rotary
  // embedding.
  void project(const RmsNormArgs& norm, float* keys, float* q, Arena& scratch, ThreadPool& pool) const {
    if (s_.q_lora == 0)
      return LinearLayer::forward_all_normed(norm, Outputs{{{&w_.q_b, q}, {&w_.kv_a, keys}}}, scratch, pool);
    const ActRows& x = norm.out_act;
    float* compressed = scratch.take<float>(x.rows * s_.q_lora);
    const ActRows normed = {scratch.take<float>(x.rows * s_.q_lora), x.dtype, x.rows, s_.q_lora};
    LinearLayer::forward_all_normed(norm, Outputs{{{&w_.q_a, compressed}, {&w_.kv_a, keys}}}, scratch, pool);
    w_.q_b.forward_normed({compressed, w_.q_norm.as<float>(), kLatentNormEps, normed, nullptr}, q, scratch,
                          pool);
  }

  // The parts of the sequences that are in `rows`, with row numbers relative to rows.first.
  static std::span<const SequenceRows> cut(const Batch& batch, Shard rows, SequenceRows* out) {
    size_t n = 0;
    for (const SequenceRows& s : batch.sequences) {
      const int64_t first = std::max(s.first_row, rows.first);
      const int64_t end = std::min(s.first_row + s.num_rows, rows.first + rows.count);
      if (first < end)
        out[n++] = {first - rows.first, end - first, s.first_position + first - s.first_row, s.page_table};
    }
    return {out, n};
  }

  // Some rows and the sequences' parts in them.
  struct Pass {
    const float* q;  // [rows, heads * query]
    float* wide;     // [rows, heads * key]: the queries that attention reads; the rotary parts are written
    std::span<const SequenceRows> sequences;
  };
  void attend(const AttentionInput& in, Shard rows, const Pass& pass, Arena& scratch,
              ThreadPool& pool) const {
    const int64_t q_stride = s_.heads * s_.query(), key_stride = s_.heads * s_.key();
    const int num_heads = static_cast<int>(s_.heads);
    ops_.head_linear({pass.q, q_stride, s_.query(), w_.up.as<bf16>(), pass.wide, DType::kF32, key_stride,
                      s_.key(), rows.count, s_.latent, s_.nope, num_heads, w_.up_scale},
                     pool);
    const int64_t latent_stride = s_.heads * s_.latent;
    float* latents = scratch.take<float>(rows.count * latent_stride);
    AttentionArgs args = shape();
    args.q = pass.wide;
    args.q_stride = key_stride;
    args.k_pages = scaled(in.k_pages);
    args.v_pages = scaled(in.v_pages);
    args.sequences = pass.sequences;
    args.device_batch = in.batch.device;
    args.out = ActRows{latents, DType::kF32, rows.count, latent_stride};
    args.workspace = scratch.take<uint8_t>(attention_workspace(ops_, args, rows.count));
    ops_.attention(args, pool);
    uint8_t* out =
        static_cast<uint8_t*>(in.out.data) + rows.first * in.out.cols * dtype_bits(in.out.dtype) / 8;
    const auto* value_up = reinterpret_cast<const bf16*>(w_.up.data() + w_.value_up);
    ops_.head_linear({latents, latent_stride, s_.latent, value_up, out, in.out.dtype, in.out.cols, s_.value,
                      rows.count, s_.value, s_.latent, num_heads, w_.up_scale},
                     pool);
  }

  KvPages scaled(KvPages pages) const {
    pages.scale = w_.kv_scale;
    return pages;
  }

  // A GPU processes all rows at once, because the sequences of its batches cannot be split here.
  int64_t rows_per_pass() const { return ops_.memory().is_host() ? kRowsPerPass : INT64_MAX; }

  // The arguments that do not depend on the batch.
  AttentionArgs shape() const {
    AttentionArgs args;
    args.k_pages.num_kv_heads = 1;
    args.k_pages.head_dim = static_cast<int>(s_.key());
    args.v_pages.head_dim = static_cast<int>(s_.latent);
    args.num_heads = static_cast<int>(s_.heads);
    args.scale = w_.scale;
    return args;
  }

  const DenseOps& ops_;
  const MlaWeights w_;
  const MlaSizes s_;
};

// The softmax scale, with YaRN's correction as in Hugging Face's implementation.
float softmax_scale(const ModelConfig& config) {
  const double scale = 1 / std::sqrt(static_cast<double>(config.head_dim));
  const RopeConfig& rope = config.rope;
  if (rope.type == RopeConfig::Type::kDefault || !rope.mscale_all_dim || rope.factor <= 1)
    return static_cast<float>(scale);
  const double mscale = 0.1 * *rope.mscale_all_dim * std::log(rope.factor) + 1;
  return static_cast<float>(scale * mscale * mscale);
}

// Appends the row numbers of a rotary part that starts at `first`, ordered so that pairs are (i, i + n/2).
void append_rope_rows(const MlaConfig& mla, int64_t first, std::vector<int64_t>& rows) {
  const int64_t n = mla.qk_rope_head_dim;
  for (int64_t i = 0; i < n; ++i)
    rows.push_back(first + (mla.rope_interleave ? 2 * (i % (n / 2)) + i / (n / 2) : i));
}

Status load_projections(WeightLoader& loader, const std::string& prefix, Shard heads, MlaWeights& w) {
  const ModelConfig& config = loader.config();
  const MlaSizes& s = w.sizes;
  const bool bias = config.attention_bias;
  const int64_t h = config.hidden_size;
  std::vector<int64_t> rows = row_range(0, s.latent);
  append_rope_rows(config.mla, s.latent, rows);
  FP4MOE_ASSIGN_OR_RETURN(const LinearWeightsView kv_a,
                          loader.view(prefix + "kv_a_proj_with_mqa", {s.key(), h, bias}));
  FP4MOE_ASSIGN_OR_RETURN(w.kv_a, loader.linear({LinearPart{kv_a, rows, {}}}));
  FP4MOE_ASSIGN_OR_RETURN(w.kv_norm, loader.floats(prefix + "kv_a_layernorm.weight", s.latent));
  rows.clear();
  for (int64_t head = heads.first; head < heads.first + heads.count; ++head) {
    for (int64_t i = 0; i < s.nope; ++i) rows.push_back(head * s.query() + i);
    append_rope_rows(config.mla, head * s.query() + s.nope, rows);
  }
  const bool compressed = s.q_lora > 0;
  FP4MOE_ASSIGN_OR_RETURN(const LinearWeightsView q_b,
                          loader.view(prefix + (compressed ? "q_b_proj" : "q_proj"),
                                      {config.num_heads * s.query(), compressed ? s.q_lora : h}));
  FP4MOE_ASSIGN_OR_RETURN(w.q_b, loader.linear({LinearPart{q_b, rows, {}}}));
  if (!compressed) return {};
  FP4MOE_ASSIGN_OR_RETURN(w.q_a, loader.linear(prefix + "q_a_proj", {s.q_lora, h, bias}));
  FP4MOE_ASSIGN_OR_RETURN(w.q_norm, loader.floats(prefix + "q_a_layernorm.weight", s.q_lora));
  return {};
}

// The scale of all values of kv_b_proj, which multiplies the sums; up_projection_rows() leaves it out.
float up_projection_scale(const LinearWeightsView& kv_b) {
  if (kv_b.is_fp4) return kv_b.fp4.tensor_scale;
  return kv_b.is_fp8() && kv_b.fp8_scales->size() == 1 ? kv_b.fp8.scales[0] : 1;
}

// kv_b_proj as bf16, divided by up_projection_scale(). FP4: code * block scale, which is exact. FP8: exact
// with one scale for the matrix or scales that are powers of two, else rounded.
Result<const bf16*> up_projection_rows(const LinearWeightsView& kv_b, Buffer& storage) {
  if (kv_b.weight != nullptr) return kv_b.weight;
  FP4MOE_ASSIGN_OR_RETURN(storage, Buffer::make(kv_b.n * kv_b.k * 2));
  Fp4MatrixView matrix = kv_b.fp4;
  matrix.tensor_scale = 1;
  Fp8LinearView codes = kv_b.fp8;
  constexpr float kOne = 1;
  if (kv_b.is_fp8() && kv_b.fp8_scales->size() == 1) codes.scales = &kOne;
  std::vector<float> row(static_cast<size_t>(kv_b.k));
  for (int64_t r = 0; r < kv_b.n; ++r) {
    if (kv_b.is_fp4)
      fp4_dequantize_row(matrix, r, row.data());
    else
      fp8_dequantize_row(codes, kv_b.k, r, row.data());
    for (int64_t c = 0; c < kv_b.k; ++c)
      storage.as<bf16>()[r * kv_b.k + c] = float_to_bf16(row[static_cast<size_t>(c)]);
  }
  return storage.as<bf16>();
}

// kv_b_proj [num_heads (nope + value), latent] -> key_up (transposed) and value_up of this rank's heads. No
// scheme quantises their inputs, because these are not the inputs of the checkpoint's layer.
Status load_up_projections(WeightLoader& loader, const std::string& prefix, Shard heads, MlaWeights& w) {
  const MlaSizes& s = w.sizes;
  const LinearLayout layout = loader.ops().head_linear_layout;
  FP4MOE_ASSIGN_OR_RETURN(
      const LinearWeightsView kv_b,
      loader.view(prefix + "kv_b_proj", {loader.config().num_heads * (s.nope + s.value), s.latent}));
  w.up_scale = up_projection_scale(kv_b);
  const int64_t head_rows = s.nope + s.value;
  FP4MOE_RETURN_IF_ERROR(
      loader.check_part({kv_b, row_range(heads.first * head_rows, heads.count * head_rows), {}}));
  const int64_t key_bytes = linear_weight_bytes(s.latent, s.nope, layout);
  const int64_t value_bytes = linear_weight_bytes(s.value, s.latent, layout);
  w.value_up = Arena::padded(s.heads * key_bytes);
  const auto pack = [&](uint8_t* key_up) -> Status {
    uint8_t* value_up = key_up + w.value_up;
    Buffer dequantised;
    FP4MOE_ASSIGN_OR_RETURN(const bf16* rows, up_projection_rows(kv_b, dequantised));
    FP4MOE_ASSIGN_OR_RETURN(const Buffer transposed, Buffer::make(s.latent * s.nope * 2));
    for (int64_t head = 0; head < s.heads; ++head) {
      const bf16* keys = rows + (heads.first + head) * (s.nope + s.value) * s.latent;
      for (int64_t i = 0; i < s.nope; ++i)
        for (int64_t j = 0; j < s.latent; ++j) transposed.as<bf16>()[j * s.nope + i] = keys[i * s.latent + j];
      pack_linear_weight(transposed.as<bf16>(), s.latent, s.nope, layout, key_up + head * key_bytes,
                         loader.pool());
      pack_linear_weight(keys + s.nope * s.latent, s.value, s.latent, layout, value_up + head * value_bytes,
                         loader.pool());
    }
    return {};
  };
  FP4MOE_ASSIGN_OR_RETURN(Buffer up, packed_weights(w.value_up + s.heads * value_bytes, pack));
  FP4MOE_ASSIGN_OR_RETURN(w.up, loader.put(std::move(up)));
  loader.count(s.heads * (s.nope + s.value) * s.latent * 2);
  return {};
}

}  // namespace

Result<std::unique_ptr<Attention>> load_mla(WeightLoader& loader, const std::string& prefix) {
  const ModelConfig& config = loader.config();
  const RankLayout& layout = loader.layout();
  // Latents and rotary keys form one KV head, which every rank has.
  const Shard heads = head_shard(config.num_heads, 1, layout.attention_tp(), layout.attention_rank()).query;
  MlaWeights w;
  w.sizes = {.heads = heads.count,
             .latent = config.mla.kv_lora_rank,
             .nope = config.mla.qk_nope_head_dim,
             .rope = config.mla.qk_rope_head_dim,
             .value = config.mla.v_head_dim,
             .q_lora = config.mla.q_lora_rank};
  const RopeTable rope = make_rope_table(config.rope, w.sizes.rope);
  w.rope_factor = rope.attention_factor;
  FP4MOE_ASSIGN_OR_RETURN(w.inv_freq, loader.put(rope.inv_freq));
  w.scale = softmax_scale(config);
  FP4MOE_RETURN_IF_ERROR(load_projections(loader, prefix, heads, w));
  FP4MOE_RETURN_IF_ERROR(load_up_projections(loader, prefix, heads, w));
  FP4MOE_ASSIGN_OR_RETURN(const KvScales kv_scales, loader.kv_scales(prefix));
  w.kv_scale = kv_scales.k;
  return std::unique_ptr<Attention>(std::make_unique<MlaAttention>(loader.ops(), std::move(w)));
}

}  // namespace fp4moe
