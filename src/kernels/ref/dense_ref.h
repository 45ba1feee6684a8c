// The oracle for every dense op: plain loops, double accumulation, weights as in the checkpoint. --dtype
// float32 also runs these ops, so they distribute rows or outputs over the pool.
#pragma once

#include "kernels/ops.h"

namespace fp4moe::ref {

void linear(const LinearArgs& args, ThreadPool& pool);
void linear_q8(const LinearArgs& args, ThreadPool& pool);  // the weight is LinearLayout::kRowMajorQ8
void embed(const EmbedArgs& args, ThreadPool& pool);
void rms_norm(const RmsNormArgs& args, ThreadPool& pool);
void norm_linear(const NormLinearArgs& args, ThreadPool& pool);
void norm_linear_q8(const NormLinearArgs& args, ThreadPool& pool);
void rope(const RopeArgs& args, ThreadPool& pool);
void kv_write(const KvWriteArgs& args, ThreadPool& pool);
void rope_attention(const RopeAttentionArgs& args, ThreadPool& pool);
void latent_rope(const LatentRopeArgs& args, ThreadPool& pool);
void attention(const AttentionArgs& args, ThreadPool& pool);
void head_norm(const HeadNormArgs& args, ThreadPool& pool);
void head_linear(const HeadLinearArgs& args, ThreadPool& pool);
void silu_mul(const SiluMulArgs& args, ThreadPool& pool);
void add(const AddArgs& args, ThreadPool& pool);
void gather_rows(const GatherRowsArgs& args, ThreadPool& pool);
void copy_heads(const CopyHeadsArgs& args, ThreadPool& pool);
void convert_rows(const ConvertRowsArgs& args, ThreadPool& pool);
void sigmoid_gate(const SigmoidGateArgs& args, ThreadPool& pool);
void mul_sigmoid(const MulSigmoidArgs& args, ThreadPool& pool);
void gated_delta(const GatedDeltaArgs& args, ThreadPool& pool);

// Parts of gated_delta that the CPU ops use too: the check of its dims, and the update of the slots' conv
// inputs, which follows all reads of them.
void check_gated_delta(const GatedDeltaArgs& args);
void store_conv_inputs(const GatedDeltaArgs& args, ThreadPool& pool);

// Returns element i of `data`, bf16 or f32.
inline float load_elem(const void* data, DType dtype, int64_t i) {
  return dtype == DType::kF32 ? static_cast<const float*>(data)[i]
                              : bf16_to_float(static_cast<const bf16*>(data)[i]);
}

inline void store_elem(void* data, DType dtype, int64_t i, float value) {
  if (dtype == DType::kF32)
    static_cast<float*>(data)[i] = value;
  else
    static_cast<bf16*>(data)[i] = float_to_bf16(value);
}

}  // namespace fp4moe::ref
