// The expert GEMMs of w4a16 for many rows per expert (sm90_wide_gemm.cu).
#pragma once

#include "kernels/device_moe.h"

namespace fp4moe {

// As DeviceMoeOps::gate_up and down of packed rows, but with slabs (token_slabs.h) of num_slab_rows(max_rows,
// 0, L) rows: x.data, already grouped by expert (gather is ignored), and h.data, which gate_up writes and
// down reads. No row scales; down writes y_bf16.
void sm90_wide_gate_up(const DeviceExpertArgs& args);
void sm90_wide_down(const DeviceExpertArgs& args);

// x [T, K] bf16, row slot_of_row[r] / topk -> row r's place in slabs, zeros past K. rows: packed.
struct TokenSlabArgs {
  const bf16* x = nullptr;
  DeviceRows rows;
  int64_t num_experts = 0, topk = 1, cols = 0;  // K
  uint8_t* slabs = nullptr;
};
void gather_token_slabs(const TokenSlabArgs& args);

}  // namespace fp4moe
