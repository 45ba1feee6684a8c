// Paged attention on a GPU. The kernel (decode, prefill or MLA) is chosen only from the arguments.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"
#include "kernels/ops.h"

namespace fp4moe::cuda {

// DenseOps::attention. args.device_batch is set, pages are bf16 or E4M3 codes, and page_size is a power of
// two up to 128. Rows of q are 8-byte aligned (q_stride is even), and rows of pages are 16-byte aligned;
// k_pages.head_dim is a multiple of 16. Either v_pages.data differs from k_pages.data, and head dims are
// equal and at most 256; or the two are the same (MLA), v_pages.head_dim is at most 512, and k_pages.head_dim
// is at most 576. q is rounded to bf16; to f16 by decode over E4M3 pages, where |q| must be below 65520. out
// is bf16 or f32 and 16-byte aligned; its padding rows become zero. The pool is not used; work is enqueued on
// the current stream.
void attention(const AttentionArgs& args, ThreadPool& pool);

// DenseOps::rope_attention: one kernel for decode if heads have 64 or 128 dims and all are rotated, or 128 or
// 256 dims and 64 are rotated; with norms, not for 64 dims. Otherwise two kernels, and one for the gate.
// Preconditions as above, and k and v are 16-byte aligned. K/V rows of earlier steps are read before the
// preceding kernels are done.
void rope_attention(const RopeAttentionArgs& args, ThreadPool& pool);

// The same ops with one algorithm for any batch: prefill's kernel for all rows, or MLA's kernel with a fixed
// number of splits. A row's bits depend only on its keys.
void invariant_attention(const AttentionArgs& args, ThreadPool& pool);
void invariant_rope_attention(const RopeAttentionArgs& args, ThreadPool& pool);

// DenseOps::attention_workspace_bytes: 0, because partial sums stay in the shared memory of a cluster.
int64_t attention_workspace_bytes(const AttentionArgs& args, int64_t max_tokens);

}  // namespace fp4moe::cuda
