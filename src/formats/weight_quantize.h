// Quantising weights: rows of a matrix to FP4, with a choice of how hard block scales are searched for.
#pragma once

#include <cstdint>

#include "formats/fp4_matrix.h"
#include "formats/tensor_scale.h"

namespace fp4moe {

enum class ScaleSearch : uint8_t {
  kAbsmax,  // the block's largest element decides: mxfp4.h's kRoundUp, nvfp4.h's rule
  kMse,     // of that scale and those near it, the one with the least squared error; absmax's where they tie
};

// One row of `cols` elements (whole blocks) in the linear layout: codes [cols / 2], scales [cols / block].
// tensor_scale is NVFP4's, finite and positive; 1 for MXFP4. format is not kNone.
void quantize_weight_row(Fp4Format format, const float* x, int64_t cols, DecodeScale tensor_scale,
                         ScaleSearch search, uint8_t* codes, uint8_t* scales);

}  // namespace fp4moe
