// Quantises rows of a weight matrix to FP4, with or without a search for the block scales.
#pragma once

#include <cstdint>
#include <span>

#include "formats/fp4_matrix.h"
#include "formats/tensor_scale.h"

namespace fp4moe {

enum class ScaleSearch : uint8_t {
  kAbsmax,  // from the block's largest element: kRoundUp of mxfp4.h, or the rule of nvfp4.h
  kMse,     // the scale with the least squared error: that of kAbsmax, which wins ties, or one near it
};

// Quantises one row of `cols` = x.size() elements (whole blocks) in the linear layout: codes [cols / 2],
// scales [cols / block]. tensor_scale: finite and positive for NVFP4, 1 for MXFP4. format must not be kNone.
void quantize_weight_row(Fp4Format format, std::span<const float> x, DecodeScale tensor_scale,
                         ScaleSearch search, uint8_t* codes, uint8_t* scales);

}  // namespace fp4moe
