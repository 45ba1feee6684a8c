// The oracle for the expert ops: every sum is in double, over dequantised weights, one element after another.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "kernels/expert_ops.h"

namespace fp4moe {
namespace {

// A panel consists of the codes of 16 rows, then their scales, both copied unchanged from the checkpoint.
int64_t codes_bytes(int64_t k) { return kPanelRows * k / 2; }

int64_t panel_bytes(Fp4Format format, int64_t k) {
  return (codes_bytes(k) + kPanelRows * k / fp4_block(format) + 63) / 64 * 64;
}

void pack_panel(const Fp4MatrixView& w, int64_t panel, uint8_t* dst) {
  const int64_t row_codes = w.cols / 2, row_scales = w.cols / fp4_block(w.format);
  std::memset(dst, 0, static_cast<size_t>(panel_bytes(w.format, w.cols)));
  for (int64_t r = 0; r < kPanelRows; ++r) {
    const int64_t row = panel * kPanelRows + r;
    std::memcpy(dst + r * row_codes, w.codes + row * w.code_stride_bytes, static_cast<size_t>(row_codes));
    std::memcpy(dst + codes_bytes(w.cols) + r * row_scales, w.scales + row * w.scale_stride_bytes,
                static_cast<size_t>(row_scales));
  }
}

Fp4MatrixView panel_view(const ExpertGemmArgs& a, int64_t panel, float scale) {
  const uint8_t* p = a.panels + panel * panel_bytes(a.format, a.x.cols);
  return {a.format,
          kPanelRows,
          a.x.cols,
          p,
          p + codes_bytes(a.x.cols),
          a.x.cols / 2,
          a.x.cols / fp4_block(a.format),
          scale};
}

double act_at(const ActRows& x, int64_t row, int64_t col) {
  const int64_t i = row * x.cols + col;
  if (x.dtype == DType::kI8) {
    const int64_t place = i / 8 * 8 + i % 8 % 4 * 2 + i % 8 / 4;
    return static_cast<const int8_t*>(x.data)[place];
  }
  return x.dtype == DType::kF32 ? static_cast<const float*>(x.data)[i]
                                : bf16_to_float(static_cast<const bf16*>(x.data)[i]);
}

// Computes out[t] = x[t] . weight * the scales of quantised activations + bias, for all rows t of a.x.
void dot_rows(const ExpertGemmArgs& a, const std::vector<float>& weight, double bias, double* out) {
  const int64_t block = fp4_block(a.format), blocks = a.x.cols / block;
  for (int64_t t = 0; t < a.x.rows; ++t) {
    double sum = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      double block_sum = 0;
      for (int64_t k = b * block; k < (b + 1) * block; ++k)
        block_sum += act_at(a.x, t, k) * weight[static_cast<size_t>(k)];
      sum += a.x_block_scales != nullptr ? block_sum * a.x_block_scales[t * blocks + b] : block_sum;
    }
    out[t] = (a.x_row_scales != nullptr ? sum * a.x_row_scales[t] : sum) + bias;
  }
}

double activate(const Activation& act, double gate, double up) {
  switch (act.kind) {
    case ActivationKind::kSwigluOai: {
      const double g = gate > act.limit ? act.limit : gate;
      const double u = up > act.limit ? act.limit : (up < -act.limit ? -act.limit : up);
      return g / (1 + std::exp(-act.alpha * g)) * (u + act.beta);
    }
    case ActivationKind::kSilu:
      return gate / (1 + std::exp(-gate)) * up;
    case ActivationKind::kRelu2:
      return up < 0 ? 0 : up * up;
  }
  return NAN;
}

void store_act(const ExpertGateUpArgs& a, int64_t row, int64_t col, double value) {
  const int64_t i = row * a.gemm.out_stride + col;
  const float rounded = static_cast<float>(value);
  if (a.out_dtype == DType::kF32)
    static_cast<float*>(a.out)[i] = rounded;
  else
    static_cast<bf16*>(a.out)[i] = float_to_bf16(rounded);
}

// Writes row `row` of a matrix, as a GEMM multiplies it, in f32.
using WeightRow = void (*)(const Fp4MatrixView&, int64_t row, float* out);

template <WeightRow kWeightRow>
void gate_up(const ExpertGateUpArgs& a) {
  const bool gated = is_gated(a.activation.kind);
  const int64_t group = gated ? 2 : 1;
  std::vector<float> weight(static_cast<size_t>(a.gemm.x.cols));
  std::vector<double> gate(static_cast<size_t>(a.gemm.x.rows)), up(static_cast<size_t>(a.gemm.x.rows));
  for (int64_t p = 0; p < a.gemm.num_panels; p += group) {
    const int64_t up_panel = p + group - 1;
    for (int64_t r = 0; r < kPanelRows; ++r) {
      if (gated) {
        kWeightRow(panel_view(a.gemm, p, a.gate_scale), r, weight.data());
        dot_rows(a.gemm, weight, a.gemm.bias[p * kPanelRows + r], gate.data());
      }
      kWeightRow(panel_view(a.gemm, up_panel, a.up_scale), r, weight.data());
      dot_rows(a.gemm, weight, a.gemm.bias[up_panel * kPanelRows + r], up.data());
      for (int64_t t = 0; t < a.gemm.x.rows; ++t)
        store_act(a, t, p / group * kPanelRows + r,
                  activate(a.activation, gate[static_cast<size_t>(t)], up[static_cast<size_t>(t)]));
    }
  }
}

template <WeightRow kWeightRow>
void down(const ExpertDownArgs& a) {
  std::vector<float> weight(static_cast<size_t>(a.gemm.x.cols));
  std::vector<double> sums(static_cast<size_t>(a.gemm.x.rows));
  for (int64_t p = 0; p < a.gemm.num_panels; ++p) {
    for (int64_t r = 0; r < kPanelRows; ++r) {
      kWeightRow(panel_view(a.gemm, p, a.scale), r, weight.data());
      dot_rows(a.gemm, weight, a.gemm.bias[p * kPanelRows + r], sums.data());
      for (int64_t t = 0; t < a.gemm.x.rows; ++t)
        a.out[t * a.gemm.out_stride + p * kPanelRows + r] = static_cast<float>(sums[static_cast<size_t>(t)]);
    }
  }
}

void router_logits(const RouterLogitsArgs& a) {
  for (int64_t t = 0; t < a.num_tokens; ++t) {
    for (int64_t r = 0; r < kPanelRows; ++r) {
      double sum = 0;
      for (int64_t h = 0; h < a.hidden_size; ++h)
        sum += static_cast<double>(a.x[t * a.hidden_size + h]) * bf16_to_float(a.panel[h * kPanelRows + r]);
      a.out[t * a.out_stride + r] = static_cast<float>(sum + a.bias[r]);
    }
  }
}

bool is_zero_block(const uint8_t* codes, int64_t bytes) {
  return std::all_of(codes, codes + bytes, [](uint8_t pair) { return (pair & 0x77) == 0; });
}

// Returns the exponent of the power of two that scales the largest scale of the row's nonzero blocks into
// (224, 448].
int nvfp4_scale_move(const Fp4MatrixView& w, int64_t row) {
  float most = 0;
  for (int64_t b = 0; b < w.cols / 16; ++b)
    if (!is_zero_block(w.codes + row * w.code_stride_bytes + b * 8, 8))
      most = std::max(most, e4m3_decode(w.scales[row * w.scale_stride_bytes + b]));
  if (most == 0) return 0;
  const int move = 8 - std::ilogb(most);
  return std::ldexp(most, move) > kE4m3Max ? move - 1 : move;
}

constexpr ExpertOps kRefExpertOps = {
    "ref", panel_bytes, pack_panel, gate_up<fp4_dequantize_row>, down<fp4_dequantize_row>, router_logits};
constexpr ExpertOps kRefFp8ExpertOps = {
    "ref_fp8", panel_bytes, pack_panel, gate_up<fp8_folded_row>, down<fp8_folded_row>, router_logits};

}  // namespace

void fp8_folded_row(const Fp4MatrixView& w, int64_t row, float* out) {
  if (w.format == Fp4Format::kMxfp4) return fp4_dequantize_row(w, row, out);  // powers of two: exact
  const int move = nvfp4_scale_move(w, row);
  for (int64_t c = 0; c < w.cols; ++c) {
    const float scale = e4m3_decode(w.scales[row * w.scale_stride_bytes + c / 16]);
    const int pair = w.codes[row * w.code_stride_bytes + c / 2];
    const float code = e2m1_decode(static_cast<uint8_t>(c % 2 == 0 ? pair & 15 : pair >> 4));
    const float operand = e4m3_decode(e4m3_encode(code * std::ldexp(scale, move - 3)));
    out[c] = operand * std::ldexp(8.0f, -move) * w.tensor_scale;
  }
}

const ExpertOps& ref_expert_ops() { return kRefExpertOps; }
const ExpertOps& ref_fp8_expert_ops() { return kRefFp8ExpertOps; }

}  // namespace fp4moe
