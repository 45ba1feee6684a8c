// The expert GEMMs of w4a16 for many rows per expert (sm90_wide_gemm.cu).
#pragma once

#include "kernels/device_moe.h"

namespace fp4moe {

// Like DeviceMoeOps::gate_up and down for packed rows, but x.data and h.data are slabs (token_slabs.h) of
// num_slab_rows(max_rows, 0, L) rows. x.data is already grouped by expert (gather is ignored); gate_up writes
// h.data and down reads it. Row scales are not supported; down writes y_bf16.
void sm90_wide_gate_up(const DeviceExpertArgs& args);
void sm90_wide_down(const DeviceExpertArgs& args);

// Arguments of gather_token_slabs(), which copies, for each slot s with a packed row, row s / topk of
// x [T, K] bf16 to the place of row row_of_slot[s] in slabs. Columns past K are filled with zeros.
struct TokenSlabArgs {
  const bf16* x = nullptr;
  DeviceRows rows;
  int64_t num_experts = 0, num_tokens = 0, topk = 1, cols = 0;  // T and K
  uint8_t* slabs = nullptr;
};
void gather_token_slabs(const TokenSlabArgs& args);

}  // namespace fp4moe
