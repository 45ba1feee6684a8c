// Paged attention on a GPU: decode, prefill and MLA, chosen only from the arguments.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"
#include "kernels/ops.h"

namespace fp4moe::cuda {

// DenseOps::attention. args.device_batch is set, pages are bf16, page_size is a power of two up to 128. Rows
// of q are 8-byte aligned (q_stride is even), rows of pages 16-byte aligned; k_pages.head_dim is a multiple
// of 16. Either v_pages.data differs from k_pages.data, and head dims are equal and at most 256; or it is the
// same (MLA), and v_pages.head_dim is at most 512, k_pages.head_dim at most 576. q is rounded to bf16. out is
// bf16 or f32; its padding rows become zero. The pool is not used; work is enqueued on the current stream.
void attention(const AttentionArgs& args, ThreadPool& pool);

// DenseOps::rope_attention: one kernel for decode if heads have 64 or 128 dims, all of them rotated;
// otherwise two. Preconditions as above; k and v are 16-byte aligned. K/V rows of earlier steps are read
// before the preceding kernels are done.
void rope_attention(const RopeAttentionArgs& args, ThreadPool& pool);

// The same with one algorithm for any batch: prefill's kernel for all rows, MLA's with a fixed number of
// splits. A row's bits depend only on its keys.
void invariant_attention(const AttentionArgs& args, ThreadPool& pool);
void invariant_rope_attention(const RopeAttentionArgs& args, ThreadPool& pool);

// DenseOps::attention_workspace_bytes: none, partial sums stay in the shared memory of a cluster.
int64_t attention_workspace_bytes(const AttentionArgs& args, int64_t max_tokens);

}  // namespace fp4moe::cuda
