// Chooses the attention kernel and its number of splits.
#include "kernels/cuda/attention.h"

#include <algorithm>
#include <bit>

#include "base/check.h"
#include "kernels/cuda/attention_params.h"

namespace fp4moe::cuda {
namespace {

constexpr int kMaxCluster = 16;
constexpr int64_t kMaxBlocks = 132;  // of launches that are split: more would wait for an SM of an H200

AttentionParams make_params(const AttentionArgs& args) {
  const KvPages &k = args.k_pages, &v = args.v_pages;
  const DeviceBatch& batch = *args.device_batch;
  FP4MOE_CHECK(k.dtype == DType::kBF16 && v.dtype == DType::kBF16, "pages are not bf16");
  FP4MOE_CHECK(k.page_size <= 128 && std::has_single_bit(unsigned(k.page_size)), "page_size");
  const bool mla = v.data == k.data;
  FP4MOE_CHECK(k.head_dim % 16 == 0 && (mla ? k.head_dim <= 576 && v.head_dim <= 512
                                            : k.head_dim <= 256 && v.head_dim == k.head_dim),
               "head_dim");
  AttentionParams p = {};
  p.q = args.q, p.q_stride = args.q_stride, p.out_cols = args.out.cols;
  p.k = static_cast<const uint16_t*>(k.data), p.v = static_cast<const uint16_t*>(v.data);
  p.k_stride = k.row_stride != 0 ? k.row_stride : k.head_dim;
  p.v_stride = v.row_stride != 0 ? v.row_stride : v.head_dim;
  p.k_dim = k.head_dim, p.v_dim = v.head_dim;
  p.num_kv_heads = k.num_kv_heads, p.group = args.num_heads / k.num_kv_heads;
  p.page_shift = std::countr_zero(unsigned(k.page_size)), p.max_pages = static_cast<int>(batch.max_pages);
  p.row_sequence = batch.row_sequence, p.first_row = batch.first_row;
  p.first_position = batch.first_position, p.page_table = batch.page_table, p.positions = batch.positions;
  p.num_rows = static_cast<int>(batch.num_rows), p.num_sequences = static_cast<int>(batch.num_sequences);
  p.window = static_cast<int>(std::min<int64_t>(args.window, INT32_MAX));
  p.scale_log2 = args.scale * kLog2e;
  p.sinks = args.sinks;
  p.out = args.out.data, p.out_f32 = args.out.dtype == DType::kF32;
  return p;
}

// Blocks of a cluster, a power of two: as many as the device has room for with `units` clusters, while each
// has enough of the longest context to pay for its share of the merge (which grows beyond 4).
int cluster_size(int64_t units, int64_t max_keys) {
  int splits = 1;
  while (splits < kMaxCluster && units * splits * 2 <= kMaxBlocks &&
         max_keys >= (splits < 4 ? 32 : 128) * splits * 2)
    splits *= 2;
  return splits;
}

}  // namespace

void attention(const AttentionArgs& args, ThreadPool&) {
  const AttentionParams p = make_params(args);
  if (p.num_rows == 0) return;
  const int64_t units = int64_t{p.num_rows} * p.num_kv_heads;
  const int64_t keys = static_cast<int64_t>(p.max_pages) << p.page_shift;
  const int64_t max_keys = p.window > 0 ? std::min<int64_t>(p.window, keys) : keys;
  if (args.v_pages.data == args.k_pages.data) {
    launch_attention_mla(p, cluster_size((units * p.group + 63) / 64, max_keys));
  } else if (args.device_batch->max_rows == 1 && p.group <= 16 && p.k_dim <= 128) {
    launch_attention_decode(p, cluster_size(units, max_keys));
  } else {
    launch_attention_prefill(p);
  }
}

int64_t attention_workspace_bytes(const AttentionArgs&, int64_t) { return 0; }

}  // namespace fp4moe::cuda
