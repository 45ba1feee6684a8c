// Chooses the attention kernel and its number of splits.
#include "kernels/cuda/attention/attention.h"

#include <algorithm>
#include <bit>

#include "base/check.h"
#include "kernels/cuda/attention/attention_params.h"
#include "kernels/cuda/dense_kernels.h"

namespace fp4moe::cuda {
namespace {

constexpr int64_t kDecodeBlocks = 528;  // four of decode's blocks per SM of an H200
constexpr int64_t kMlaBlocks = 132;
constexpr int kInvariantSplits = 8;  // for MLA

AttentionParams make_params(const AttentionArgs& args) {
  const KvPages &k = args.k_pages, &v = args.v_pages;
  const DeviceBatch& batch = *args.device_batch;
  FP4MOE_CHECK(k.dtype == v.dtype && (k.dtype == DType::kBF16 || k.dtype == DType::kF8E4M3),
               "pages must be bf16 or E4M3");
  FP4MOE_CHECK(k.head_dim % 16 == 0 && k.page_size <= 128 && std::has_single_bit(unsigned(k.page_size)),
               "head_dim must be a multiple of 16, and page_size a power of two up to 128");
  AttentionParams p = {};
  p.q = args.q, p.q_stride = args.q_stride, p.out_cols = args.out.cols;
  p.k = static_cast<uint8_t*>(k.data), p.v = static_cast<uint8_t*>(v.data);
  p.is_fp8 = k.dtype == DType::kF8E4M3;
  p.k_inverse = 1 / k.scale, p.v_inverse = 1 / v.scale, p.v_scale = v.scale;
  p.k_stride = k.row_stride != 0 ? k.row_stride : k.head_dim;
  p.v_stride = v.row_stride != 0 ? v.row_stride : v.head_dim;
  p.k_dim = k.head_dim, p.v_dim = v.head_dim;
  p.num_kv_heads = k.num_kv_heads, p.group = args.num_heads / k.num_kv_heads;
  p.page_shift = std::countr_zero(unsigned(k.page_size)), p.max_pages = static_cast<int>(batch.max_pages);
  p.row_sequence = batch.row_sequence, p.first_row = batch.first_row;
  p.first_position = batch.first_position, p.page_table = batch.page_table, p.positions = batch.positions;
  p.num_rows = static_cast<int>(batch.num_rows), p.num_sequences = static_cast<int>(batch.num_sequences);
  p.window = static_cast<int>(std::min<int64_t>(args.window, INT32_MAX));
  p.scale_log2 = args.scale * k.scale * kLog2e;
  p.sinks = args.sinks;
  p.out = args.out.data, p.out_f32 = args.out.dtype == DType::kF32;
  return p;
}

// Returns the blocks per cluster: the largest power of two for which `units` clusters have at most `blocks`
// blocks and each block gets at least `min_keys` keys of the longest context.
int cluster_size(int64_t units, int64_t blocks, int64_t max_keys, int64_t min_keys) {
  int splits = 1;
  while (splits < kMaxCluster && units * splits * 2 <= blocks && max_keys >= min_keys * splits * 2)
    splits *= 2;
  return splits;
}

// max_keys: the longest context of a row; units: the number of (row, kv head) pairs.
struct Work {
  int64_t units, max_keys;
};
Work work_of(const AttentionParams& p) {
  const int64_t keys = static_cast<int64_t>(p.max_pages) << p.page_shift;
  return {int64_t{p.num_rows} * p.num_kv_heads, p.window > 0 ? std::min<int64_t>(p.window, keys) : keys};
}

bool is_latent(const AttentionArgs& args) { return args.v_pages.data == args.k_pages.data; }
bool is_decode(const AttentionArgs& args, const AttentionParams& p) {
  if (is_latent(args) || args.device_batch->max_rows != 1) return false;
  return p.k_dim <= 128 ? p.group <= 16 : p.k_dim <= 256 && p.group <= 8;
}
void decode(const AttentionParams& p) {
  const Work work = work_of(p);
  launch_attention_decode(p, cluster_size(work.units, kDecodeBlocks, work.max_keys, 32), work.max_keys);
}

// Whether decode's lanes have both elements of every pair that is rotated, and norm heads of this size if
// there are norms.
bool fuses_rope(const RopeKvArgs& rope) {
  const RopeArgs& q = rope.q;
  if (rope.norm.q != nullptr && q.head_dim < 128) return false;
  if (q.head_dim == 256) return q.rotary_dim == 64;
  if (q.head_dim != 64 && q.head_dim != 128) return false;
  return q.rotary_dim == q.head_dim || (q.head_dim == 128 && q.rotary_dim == 64);
}

void apply_gate(const RopeAttentionArgs& args, ThreadPool& pool) {
  if (args.gate != nullptr) mul_sigmoid(output_gate_args(args), pool);
}

}  // namespace

void attention(const AttentionArgs& args, ThreadPool&) {
  const AttentionParams p = make_params(args);
  if (p.num_rows == 0) return;
  if (is_decode(args, p)) return decode(p);
  if (!is_latent(args)) return launch_attention_prefill(p);
  const Work work = work_of(p);
  launch_attention_mla(p, cluster_size((work.units * p.group + 63) / 64, kMlaBlocks, work.max_keys, 64));
}

void rope_attention(const RopeAttentionArgs& args, ThreadPool& pool) {
  const RopeArgs& q = args.rope.q;
  AttentionParams p = make_params(args.attention);
  if (p.num_rows == 0) return;
  // Decode's blocks load cached keys before any block has stored a new one.
  const bool reads_new_keys = args.attention.device_batch->shares_pages;
  if (!is_decode(args.attention, p) || !fuses_rope(args.rope) || reads_new_keys) {
    rope_kv(args.rope, pool);
    attention(args.attention, pool);
    return apply_gate(args, pool);
  }
  p.rope = {.k = args.rope.kv.k,
            .v = args.rope.kv.v,
            .stride = args.rope.kv.row_stride,
            .inv_freq = q.inv_freq,
            .factor = q.attention_factor,
            .half = q.rotary_dim / 2,
            .norm = args.rope.norm};
  p.gate = args.gate, p.gate_stride = args.gate_stride;
  decode(p);
}

void invariant_attention(const AttentionArgs& args, ThreadPool&) {
  const AttentionParams p = make_params(args);
  if (p.num_rows == 0) return;
  if (is_latent(args))
    launch_attention_mla(p, kInvariantSplits);
  else
    launch_attention_prefill(p);
}

void invariant_rope_attention(const RopeAttentionArgs& args, ThreadPool& pool) {
  rope_kv(args.rope, pool);
  invariant_attention(args.attention, pool);
  apply_gate(args, pool);
}

int64_t attention_workspace_bytes(const AttentionArgs&, int64_t) { return 0; }

}  // namespace fp4moe::cuda
