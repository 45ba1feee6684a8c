#include "kernels/cuda/layout/fp8_tile_layout.h"

#include <string>

#include "base/check.h"

namespace fp4moe {
namespace {

constexpr int kMxIndices = kFp8MxTop - kFp8MxBottom + 1;

}  // namespace

Status check_fp8_scale_span(int span) {
  if (span < kMxIndices) return {};
  return unsupported("e8m0 scales of one row span " + std::to_string(span) +
                     " octaves; exact FP8 operands allow at most " + std::to_string(kMxIndices - 1));
}

Status check_fp8_scales(const Fp4MatrixView& w) {
  if (w.format != Fp4Format::kMxfp4) return {};
  for (int64_t r = 0; r < w.rows; ++r) {
    ScaleRange range;
    range.add_row(w, r);
    if (range.most >= range.least)
      FP4MOE_RETURN_IF_ERROR(
          check_fp8_scale_span(range.most - range.least).with_context("row " + std::to_string(r)));
  }
  return {};
}

}  // namespace fp4moe
