// The ops of a MoE layer's experts and router, declared once. Implementations: kernels/ref (naive, double
// accumulation: the oracle and the float32 mode) and kernels/cpu (16-row panels, one file per ISA).
//
// The conventions of kernels/ops.h hold. A weight [N, K] is cut into N / 16 panels of 16 rows; the panel
// layout is private to the table: pack_panel() writes it, and gate_up() and down() read it. An op computes
// one chunk (some panels times all rows of one expert); the caller distributes chunks over threads.
#pragma once

#include <cstdint>

#include "formats/fp4_matrix.h"
#include "kernels/ops.h"

namespace fp4moe {

constexpr int64_t kPanelRows = 16;

enum class ActivationKind : uint8_t {
  kSwigluOai,  // g = min(g, limit), u = clamp(u, -limit, limit): g * sigmoid(alpha * g) * (u + beta)
  kSilu,       // g * sigmoid(g) * u
  kRelu2,      // max(u, 0)^2; not gated: there is no gate matrix
};

struct Activation {
  ActivationKind kind = ActivationKind::kSwigluOai;
  float alpha = 1.702f, beta = 1.0f, limit = 7.0f;  // kSwigluOai only
};

constexpr bool is_gated(ActivationKind kind) { return kind != ActivationKind::kRelu2; }

// Inputs of a chunk of either GEMM. Panels are contiguous and take panel_bytes(format, k) each.
struct ExpertGemmArgs {
  Fp4Format format = Fp4Format::kMxfp4;
  ActRows x;  // [rows, K], contiguous: one expert's rows, or quantize_act()'s output for them
  const uint8_t* panels = nullptr;  // [num_panels], 64-byte aligned
  const float* bias = nullptr;      // [num_panels * 16], zeros if the model has no bias
  int64_t num_panels = 0;
  int64_t out_stride = 0;  // elements from one row of out to the next
  // [rows, K / fp4_block]: each multiplies its block's sum. Given with kI8 rows (w4a8) and only with those.
  const float* x_block_scales = nullptr;
  const int32_t* x_block_starts = nullptr;  // from quantize_act(), given with the scales
  const float* x_row_scales = nullptr;      // [rows] or null: each multiplies the row's sum, before the bias
};

// out[row, 16 p ...] = activation(x times gate panel p, x times up panel p), in f32, then rounded to
// out_dtype. Panels (and biases) alternate between gate and up; without a gate there are only up panels.
struct ExpertGateUpArgs {
  ExpertGemmArgs gemm;
  float gate_scale = 1, up_scale = 1;  // tensor scales, for decoding
  Activation activation;
  void* out = nullptr;             // the chunk's first column in [rows, I] of out_dtype; must not overlap x
  DType out_dtype = DType::kBF16;  // kBF16 or kF32
};

// out[row, 16 p ...] = x times down panel p + bias, in f32.
struct ExpertDownArgs {
  ExpertGemmArgs gemm;
  float scale = 1;       // tensor scale, for decoding
  float* out = nullptr;  // the chunk's first column in [rows, H]; must not overlap x
};

// logits = x W^T + bias for one panel of 16 experts and some tokens. Weight panels are [H][16] bf16 (rows
// past E are zero), so that 16 experts' sums run side by side.
struct RouterLogitsArgs {
  const float* x = nullptr;     // [T, H]
  const bf16* panel = nullptr;  // [H, 16]
  const float* bias = nullptr;  // [16]
  float* out = nullptr;         // the panel's first column in [T, out_stride]
  int64_t num_tokens = 0, hidden_size = 0, out_stride = 0;
};

// The expert ops at one ISA level. Stateless and re-entrant; every output element is summed in one fixed
// order, which does not depend on the numbers of rows and panels or on neighbouring rows.
struct ExpertOps {
  const char* name;  // "ref", "ref_fp8", "cpu_scalar", "cpu_avx2", "cpu_avx512", "cpu_amx"
  int64_t (*panel_bytes)(Fp4Format format, int64_t k);  // a multiple of 64; k is a multiple of the block
  // Packs rows [16 panel, 16 panel + 16) of w into dst [panel_bytes()]. Exact and invertible.
  void (*pack_panel)(const Fp4MatrixView& w, int64_t panel, uint8_t* dst);
  void (*gate_up)(const ExpertGateUpArgs&);
  void (*down)(const ExpertDownArgs&);
  void (*router_logits)(const RouterLogitsArgs&);
};

// Returns the oracle, which takes bf16, f32 or kI8 x, each with or without block scales.
const ExpertOps& ref_expert_ops();
// Returns the oracle for w4a8 with FP8 tokens: the same loops over weights rounded like the FP8 operands.
const ExpertOps& ref_fp8_expert_ops();
// Writes row `row` of w, as ref_fp8_expert_ops() multiplies it, to out [w.cols] (docs/numerics.md, "w4a8 on a
// GPU"): MXFP4 exactly, NVFP4 with each product of code and block scale rounded to e4m3.
void fp8_folded_row(const Fp4MatrixView& w, int64_t row, float* out);
// Returns the ops of one ISA level. Precondition: isa_available(isa). x must be bf16 or kI8.
const ExpertOps& cpu_expert_ops(Isa isa);

}  // namespace fp4moe
