#include "moe/fp4_linear.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/weight_store.h"
#include "kernels/act_quant.h"
#include "kernels/cuda/layout/fp8_tile_layout.h"
#include "moe/act_scales.h"
#include "moe/table.h"

namespace fp4moe {
namespace {

constexpr int64_t kChunkBytes = 96 << 10;  // weight bytes per chunk: small enough for the L2 cache
constexpr int64_t kRowsPerPiece = 8;

int64_t act_bytes(DType dtype) { return dtype_bits(dtype) / 8; }

class PanelLinear final : public Fp4Linear {
 public:
  PanelLinear(const ExpertOps& ops, const MoePlan& plan, const LinearWeightsView& w)
      : ops_(ops),
        numerics_(plan.numerics()),
        act_dtype_(plan.problem().act_dtype),
        format_(w.fp4.format),
        n_(w.fp4.rows),
        k_(w.fp4.cols),
        panel_bytes_(ops.panel_bytes(format_, k_)) {
    // The scales are those that the up projection of a single expert would have.
    ExpertWeightsView expert;
    expert.up = w.fp4;
    expert.up_input_scale = w.input_scale;
    const ExpertScales scales = resolve_scales({expert}, numerics_, {0, 1}).front();
    act_scale_ = scales.a1;
    alpha_ = scales.up;
    bias_.resize(static_cast<size_t>(padded_n()));
    for (int64_t i = 0; w.bias != nullptr && i < n_; ++i)
      bias_[static_cast<size_t>(i)] = bf16_to_float(w.bias[i]);
  }

  Status pack(const Fp4MatrixView& w, ThreadPool& pool) {
    if (numerics_.is_fp8()) FP4MOE_RETURN_IF_ERROR(check_fp8_scales(w));
    FP4MOE_ASSIGN_OR_RETURN(panels_, packed_weights(num_panels() * panel_bytes_, [&](uint8_t* to) -> Status {
                              pack_panels(w, to, pool);
                              return {};
                            }));
    return {};
  }

  int64_t scratch_bytes(int64_t max_tokens) const override {
    const int64_t quantised = Arena::padded(max_tokens * k_ * act_bytes(act_dtype_)) +
                              2 * Arena::padded(max_tokens * (k_ / fp4_block(format_)) * 4) +
                              Arena::padded(max_tokens * 4);
    return (numerics_.scheme == Scheme::kW4A16 ? 0 : quantised) + Arena::padded(max_tokens * padded_n() * 4);
  }
  int64_t weight_bytes() const override { return panels_.num_bytes() + padded_n() * 4; }

  bool forward_normed_fp4(const RmsNormArgs&, float*) const override { return false; }

  void forward_fp4_linear(const ActRows& x, float* out, int64_t out_stride, bool accumulate, Arena& scratch,
                          ThreadPool& pool) const override {
    const ExpertGemmArgs gemm = operand(x, scratch, pool);
    const bool direct = !accumulate && padded_n() == n_;
    float* sums = direct ? out : scratch.take<float>(x.rows * padded_n());
    const int64_t stride = direct ? out_stride : padded_n();
    const int64_t panels = std::clamp<int64_t>(kChunkBytes / panel_bytes_, 1,
                                               (num_panels() + pool.num_threads() - 1) / pool.num_threads());
    pool.run((num_panels() + panels - 1) / panels, [&](int64_t chunk, int) {
      const int64_t first = chunk * panels;
      ExpertGemmArgs part = gemm;
      part.panels = panels_.data() + first * panel_bytes_;
      part.bias = bias_.data() + first * kPanelRows;
      part.num_panels = std::min(panels, num_panels() - first);
      part.out_stride = stride;
      ops_.down({.gemm = part, .scale = alpha_, .out = sums + first * kPanelRows});
    });
    if (direct) return;
    for_pieces(x.rows, pool, [&](int64_t first, int64_t rows) {
      for (int64_t t = first; t < first + rows; ++t)
        for (int64_t i = 0; i < n_; ++i) {
          float& to = out[t * out_stride + i];
          to = accumulate ? to + sums[t * stride + i] : sums[t * stride + i];
        }
    });
  }

 private:
  int64_t num_panels() const { return (n_ + kPanelRows - 1) / kPanelRows; }
  int64_t padded_n() const { return num_panels() * kPanelRows; }

  // Rows past N are zero.
  void pack_panels(const Fp4MatrixView& w, uint8_t* to, ThreadPool& pool) const {
    const int64_t whole = n_ / kPanelRows;
    pool.run(whole, [&](int64_t i, int) { ops_.pack_panel(w, i, to + i * panel_bytes_); });
    if (whole == num_panels()) return;
    const int64_t codes = w.cols / 2, scales = w.cols / fp4_block(format_);
    std::vector<uint8_t> tail(static_cast<size_t>(kPanelRows * (codes + scales)));
    uint8_t* tail_scales = tail.data() + kPanelRows * codes;
    for (int64_t r = whole * kPanelRows, i = 0; r < n_; ++r, ++i) {
      std::copy_n(w.codes + r * w.code_stride_bytes, codes, tail.data() + i * codes);
      std::copy_n(w.scales + r * w.scale_stride_bytes, scales, tail_scales + i * scales);
    }
    ops_.pack_panel({format_, kPanelRows, w.cols, tail.data(), tail_scales, codes, scales, w.tensor_scale}, 0,
                    to + whole * panel_bytes_);
  }

  template <class Body>
  static void for_pieces(int64_t rows, ThreadPool& pool, const Body& body) {
    pool.run((rows + kRowsPerPiece - 1) / kRowsPerPiece, [&](int64_t i, int) {
      body(i * kRowsPerPiece, std::min(kRowsPerPiece, rows - i * kRowsPerPiece));
    });
  }

  // x, quantised as the scheme requires.
  ExpertGemmArgs operand(const ActRows& x, Arena& scratch, ThreadPool& pool) const {
    if (numerics_.scheme == Scheme::kW4A16) return {.format = format_, .x = x};
    const bool fp8 = numerics_.is_fp8(), int8 = numerics_.scheme == Scheme::kW4A8 && !fp8;
    const bool per_token = fp8 || (!int8 && numerics_.a1 == ActScaleChoice::kPerToken);
    const int block = int8 ? fp4_block(format_) : 16;
    const int64_t blocks = k_ / block, row_bytes = k_ * act_bytes(act_dtype_);
    const DType dtype = int8 ? DType::kI8 : act_dtype_;
    const int64_t out_bytes = k_ * dtype_bits(dtype) / 8;
    uint8_t* values = scratch.take<uint8_t>(x.rows * out_bytes);
    float* row_scales = per_token ? scratch.take<float>(x.rows) : nullptr;
    float* block_scales = int8 ? scratch.take<float>(x.rows * blocks) : nullptr;
    int32_t* block_starts = int8 ? scratch.take<int32_t>(x.rows * blocks) : nullptr;
    for_pieces(x.rows, pool, [&](int64_t first, int64_t rows) {
      quantize_act({.kind = fp8         ? ActQuantKind::kFp8PerToken
                            : int8      ? ActQuantKind::kInt8Block
                            : per_token ? ActQuantKind::kNvfp4PerToken
                                        : ActQuantKind::kNvfp4Static,
                    .x = {static_cast<uint8_t*>(x.data) + first * row_bytes, x.dtype, rows, k_},
                    .block = block,
                    .scale = act_scale_,
                    .out = {values + first * out_bytes, dtype, rows, k_},
                    .row_scales = per_token ? row_scales + first : nullptr,
                    .block_scales = int8 ? block_scales + first * blocks : nullptr,
                    .block_starts = int8 ? block_starts + first * blocks : nullptr});
    });
    return {.format = format_,
            .x = {values, dtype, x.rows, k_},
            .x_block_scales = block_scales,
            .x_block_starts = block_starts,
            .x_row_scales = row_scales};
  }

  const ExpertOps& ops_;
  const Numerics numerics_;
  const DType act_dtype_;
  const Fp4Format format_;
  const int64_t n_, k_, panel_bytes_;
  EncodeScale act_scale_;
  float alpha_ = 1;
  std::vector<float> bias_;  // [padded N]
  Buffer panels_;            // [ceil(N / 16)] panels of K
};

}  // namespace

Result<std::unique_ptr<Fp4Linear>> Fp4Linear::make(const MoePlan& plan, const LinearWeightsView& weights,
                                                   ThreadPool& pool) {
  FP4MOE_CHECK(plan.runner() != nullptr, "the plan is empty");
  FP4MOE_CHECK(weights.is_fp4, "weights are not FP4");
  if (plan.scheme() == Scheme::kW4A4 && weights.fp4.format == Fp4Format::kMxfp4)
    return unsupported(
        "an mxfp4 linear layer has no activation scales for w4a4; nearest legal choice: --fp4-compute w4a16");
  return plan.runner()->layers->linear(plan, weights, pool);
}

Result<std::unique_ptr<Fp4Linear>> make_host_linear(const MoePlan& plan, const LinearWeightsView& weights,
                                                    ThreadPool& pool) {
  auto linear = std::make_unique<PanelLinear>(plan.runner()->ops(), plan, weights);
  FP4MOE_RETURN_IF_ERROR(linear->pack(weights.fp4, pool));
  return std::unique_ptr<Fp4Linear>(std::move(linear));
}

}  // namespace fp4moe
