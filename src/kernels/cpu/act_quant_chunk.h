// The interface between quantize_act() and its loops, which are compiled per ISA. Every ISA gives the same
// bits.
#pragma once

#include "kernels/act_quant.h"

namespace fp4moe {

struct ActQuantChunk {
  // Returns max |x| of n elements (a multiple of 16); NaN elements are ignored.
  float (*amax)(const void* x, DType dtype, int64_t n);
  // Quantises one row to NVFP4 with the given tensor scale and its reciprocal.
  void (*nvfp4_row)(const ActQuantArgs&, int64_t row, float encode, float decode);
  void (*int8_row)(const ActQuantArgs&, int64_t row);
};

namespace cpu_scalar {
extern const ActQuantChunk act_quant_chunk;
}
namespace cpu_avx2 {
extern const ActQuantChunk act_quant_chunk;
}
namespace cpu_avx512 {
extern const ActQuantChunk act_quant_chunk;
}

}  // namespace fp4moe
