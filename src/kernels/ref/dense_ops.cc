#include "kernels/ref/dense_ref.h"

namespace fp4moe {

void ref::norm_linear(const NormLinearArgs& args, ThreadPool& pool) {
  rms_norm(args.norm, pool);
  linear(args.linear, pool);
  if (args.also.n > 0) linear(args.also, pool);
}

void ref::norm_linear_q8(const NormLinearArgs& args, ThreadPool& pool) {
  rms_norm(args.norm, pool);
  linear_q8(args.linear, pool);
  if (args.also.n > 0) linear_q8(args.also, pool);
}

void ref::rope_attention(const RopeAttentionArgs& args, ThreadPool& pool) {
  const auto& [q, k, kv, norm] = args.rope;
  if (norm.q != nullptr) {
    head_norm(head_norm_args(q, norm.q, norm.eps), pool);
    head_norm(head_norm_args(k, norm.k, norm.eps), pool);
  }
  rope(q, pool);
  rope(k, pool);
  kv_write(kv, pool);
  attention(args.attention, pool);
  if (args.gate != nullptr) mul_sigmoid(output_gate_args(args), pool);
}

void ref::latent_rope(const LatentRopeArgs& args, ThreadPool& pool) {
  head_norm(args.latents, pool);
  rope(args.k, pool);
  kv_write(args.kv, pool);
  rope(args.q, pool);
  if (args.q_out != nullptr) copy_heads(rotated_queries(args), pool);
}

const DenseOps& ref_dense_ops(DenseQuant quant) {
  static constexpr DenseOps ops = {.name = "ref",
                                   .linear_layout = LinearLayout::kRowMajor,
                                   .has_fp8 = true,
                                   .linear = ref::linear,
                                   .embed = ref::embed,
                                   .rms_norm = ref::rms_norm,
                                   .norm_linear = ref::norm_linear,
                                   .rope = ref::rope,
                                   .kv_write = ref::kv_write,
                                   .attention = ref::attention,
                                   .rope_attention = ref::rope_attention,
                                   .latent_rope = ref::latent_rope,
                                   .head_norm = ref::head_norm,
                                   .head_linear = ref::head_linear,
                                   .silu_mul = ref::silu_mul,
                                   .add = ref::add,
                                   .gather_rows = ref::gather_rows,
                                   .copy_heads = ref::copy_heads,
                                   .convert_rows = ref::convert_rows,
                                   .sigmoid_gate = ref::sigmoid_gate,
                                   .mul_sigmoid = ref::mul_sigmoid,
                                   .gated_delta = ref::gated_delta};
  static constexpr DenseOps q8_ops = [] {
    DenseOps q8 = ops;
    q8.name = "ref_q8";
    q8.linear_layout = LinearLayout::kRowMajorQ8;
    q8.linear = ref::linear_q8;
    q8.norm_linear = ref::norm_linear_q8;
    return q8;
  }();
  static constexpr DenseOps fp8_ops = [] {
    DenseOps fp8 = ops;
    fp8.name = "ref_fp8";
    fp8.linear_layout = ops.fp8_layout;
    return fp8;
  }();
  return quant == DenseQuant::kQ8 ? q8_ops : quant == DenseQuant::kFp8 ? fp8_ops : ops;
}

}  // namespace fp4moe
