// Sorts slots into rows by expert, and combines rows into tokens (moe_sort.cu, moe_combine.cu); used through
// DeviceMoeOps.
#pragma once

#include "kernels/device_moe.h"

namespace fp4moe {

void moe_sort(const MoeSortArgs& a);
void moe_combine(const MoeCombineArgs& a);

// Quantises w4a8's tokens to the values of FP8 codes: x [T, H] bf16 -> values [T, H] f16, scales [T]; H is
// a multiple of 8.
struct TokenQuantArgs {
  const bf16* x = nullptr;
  int64_t num_tokens = 0, hidden_size = 0;
  uint16_t* values = nullptr;
  float* scales = nullptr;
};
// Does the work of moe_sort(), and quantises the tokens in other blocks of its launch. Hopper only.
void moe_sort_and_quantize(const MoeSortArgs& a, const TokenQuantArgs& tokens);

}  // namespace fp4moe
