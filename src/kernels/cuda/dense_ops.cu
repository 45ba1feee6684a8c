// The table of the GPU's dense ops.
#include "device/device_memory.h"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/dense/linear_cluster.h"
#include "kernels/cuda/dense/linear_few.h"
#include "kernels/cuda/dense/linear_fp8.h"
#include "kernels/cuda/dense/linear_lt.h"
#include "kernels/cuda/dense_kernels.h"

namespace fp4moe {
namespace {

void linear(const LinearArgs& args, ThreadPool&) {
  if (linear_few_fits(args))
    linear_few(args);
  else if (args.format == LinearFormat::kFp8)
    linear_fp8(args, Fp8Splits::kBySize);
  else if (linear_cluster_fits(args))
    linear_cluster(args);
  else
    linear_lt(args, LtAlgorithm::kBest);
}

void norm_linear(const NormLinearArgs& args, ThreadPool& pool) {
  const bool has_two = args.also.n > 0;
  if (args.linear.x.rows <= kFewLoneTokens && linear_few_fits(args.linear) &&
      (!has_two || linear_few_fits(args.also)))
    return norm_linear_few(args);
  cuda::rms_norm(args.norm, pool);
  linear(args.linear, pool);
  if (has_two) linear(args.also, pool);
}

void invariant_linear(const LinearArgs& args, ThreadPool&) {
  if (args.format == LinearFormat::kFp8)
    linear_fp8(args, Fp8Splits::kNone);
  else
    linear_lt(args, LtAlgorithm::kOneForAll);
}

void invariant_norm_linear(const NormLinearArgs& args, ThreadPool& pool) {
  cuda::rms_norm(args.norm, pool);
  invariant_linear(args.linear, pool);
  if (args.also.n > 0) invariant_linear(args.also, pool);
}

constexpr DenseOps kOps = {.name = "cuda",
                           .linear_layout = LinearLayout::kRowMajor,
                           .fp8_layout = LinearLayout::kWordsFp8,
                           .has_fp8 = true,
                           .fp8_column_step = kFp8DeviceStep,
                           .linear = linear,
                           .embed = cuda::embed,
                           .rms_norm = cuda::rms_norm,
                           .norm_linear = norm_linear,
                           .most_rows_normed_inside = kFewLoneTokens,
                           .rope = cuda::rope,
                           .kv_write = cuda::kv_write,
                           .attention = cuda::attention,
                           .rope_attention = cuda::rope_attention,
                           .latent_rope = cuda::latent_rope,
                           .head_norm = cuda::head_norm,
                           .head_linear = cuda::head_linear,
                           .silu_mul = cuda::silu_mul,
                           .add = cuda::add,
                           .gather_rows = cuda::gather_rows,
                           .copy_heads = cuda::copy_heads,
                           .convert_rows = cuda::convert_rows,
                           .sigmoid_gate = cuda::sigmoid_gate,
                           .mul_sigmoid = cuda::mul_sigmoid,
                           .gated_delta = cuda::gated_delta_by_length,
                           .gated_delta_workspace_bytes = cuda::gated_delta_workspace_bytes,
                           .attention_workspace_bytes = cuda::attention_workspace_bytes,
                           .memory = device_memory};

// The other ops are those of kOps, whose sums do not depend on the batch.
constexpr DenseOps invariant_ops() {
  DenseOps ops = kOps;
  ops.name = "cuda_invariant";
  ops.linear = invariant_linear;
  ops.norm_linear = invariant_norm_linear;
  ops.most_rows_normed_inside = 0;
  ops.attention = cuda::invariant_attention;
  ops.rope_attention = cuda::invariant_rope_attention;
  ops.head_linear = cuda::invariant_head_linear;
  ops.gated_delta = cuda::gated_delta;
  ops.gated_delta_workspace_bytes = nullptr;
  return ops;
}
constexpr DenseOps kInvariantOps = invariant_ops();

// bf16 weights are stored in FP8.
constexpr DenseOps fp8_ops(DenseOps ops, const char* name) {
  ops.name = name;
  ops.linear_layout = ops.fp8_layout;
  return ops;
}
constexpr DenseOps kFp8Ops = fp8_ops(kOps, "cuda_fp8"),
                   kInvariantFp8Ops = fp8_ops(kInvariantOps, "cuda_invariant_fp8");

}  // namespace

const DenseOps* cuda_dense_ops(DenseQuant quant) { return quant == DenseQuant::kFp8 ? &kFp8Ops : &kOps; }
const DenseOps* cuda_invariant_dense_ops(DenseQuant quant) {
  return quant == DenseQuant::kFp8 ? &kInvariantFp8Ops : &kInvariantOps;
}

Status prepare_cuda_dense_ops() { return prepare_linear_lt(); }

}  // namespace fp4moe
