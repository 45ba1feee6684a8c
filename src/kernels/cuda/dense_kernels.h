// The GPU's dense ops with DenseOps' signatures; cuda/dense_ops.cu makes the table. All pointers are device
// memory; work is enqueued on the current stream; the pool is not used.
#pragma once

#include <algorithm>

#include "kernels/ops.h"

namespace fp4moe::cuda {

void embed(const EmbedArgs& args, ThreadPool& pool);
void rms_norm_rows(const RmsNormArgs& args);
inline void rms_norm(const RmsNormArgs& args, ThreadPool&) { rms_norm_rows(args); }
void head_norm(const HeadNormArgs& args, ThreadPool& pool);
void rope(const RopeArgs& args, ThreadPool& pool);
void kv_write(const KvWriteArgs& args, ThreadPool& pool);
// Runs the first half of rope_attention.
void rope_kv(const RopeKvArgs& args, ThreadPool& pool);
void latent_rope(const LatentRopeArgs& args, ThreadPool& pool);
void head_linear(const HeadLinearArgs& args, ThreadPool& pool);
// The same with sums that do not depend on the number of tokens.
void invariant_head_linear(const HeadLinearArgs& args, ThreadPool& pool);
void silu_mul(const SiluMulArgs& args, ThreadPool& pool);
void sigmoid_gate(const SigmoidGateArgs& args, ThreadPool& pool);
void mul_sigmoid(const MulSigmoidArgs& args, ThreadPool& pool);
// The recurrence for every sequence, or for those with at most most_rows new rows, replayed rows or drafts,
// others being left alone.
void gated_delta(const GatedDeltaArgs& args, ThreadPool& pool);
void gated_delta_rows(const GatedDeltaArgs& args, int most_rows);
// Chunks for sequences with many new rows (dense/gated_delta_chunks.h), the recurrence for others.
void gated_delta_by_length(const GatedDeltaArgs& args, ThreadPool& pool);
int64_t gated_delta_workspace_bytes(const GatedDeltaArgs& args, int64_t max_tokens);
void add(const AddArgs& args, ThreadPool& pool);
void gather_rows(const GatherRowsArgs& args, ThreadPool& pool);
void copy_heads(const CopyHeadsArgs& args, ThreadPool& pool);
void convert_rows(const ConvertRowsArgs& args, ThreadPool& pool);

}  // namespace fp4moe::cuda
