// Slots to rows by expert, and rows back to tokens (moe_sort.cu, moe_combine.cu), used through DeviceMoeOps.
#pragma once

#include "kernels/device_moe.h"

namespace fp4moe {

void moe_sort(const MoeSortArgs& a);
void moe_combine(const MoeCombineArgs& a);

// Tokens of w4a8 as the FP8 codes' values: x [T, H] bf16 -> values [T, H] f16, scales [T]; H % 8 == 0.
struct TokenQuantArgs {
  const bf16* x = nullptr;
  int64_t num_tokens = 0, hidden_size = 0;
  uint16_t* values = nullptr;
  float* scales = nullptr;
};
// moe_sort(), with the tokens quantised by other blocks of its launch. Hopper only.
void moe_sort_and_quantize(const MoeSortArgs& a, const TokenQuantArgs& tokens);

}  // namespace fp4moe
