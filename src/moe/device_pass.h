// The steps that layers on a GPU are made of: sorted rows, and quantised operands around the expert GEMMs.
#pragma once

#include <cstdint>

#include "base/buffer.h"
#include "kernels/device_act_quant.h"
#include "kernels/device_moe.h"
#include "moe/device_experts.h"

namespace fp4moe {

// Tokens and the experts that they go to. ids null: all slots go to the first expert.
struct DeviceSlots {
  const int32_t* ids = nullptr;  // [T, topk]
  int64_t num_tokens = 0, topk = 1, first_expert = 0;
  int64_t num_slots() const { return num_tokens * topk; }
};

// Of packed rows for these slots.
int64_t device_rows_bytes(int64_t num_slots, int64_t num_experts);
// Sorted into memory of the scratch.
DeviceRows sort_rows(const DeviceMoeOps& ops, const DeviceSlots& slots, int64_t num_experts, Arena& scratch);

// What a GEMM reads: bf16 rows, and what multiplies their sums.
struct DeviceOperand {
  ActRows rows;
  const float* row_scales = nullptr;
};

// Both GEMMs over sorted rows, under w4a4: x [T, H] bf16 -> y [num_slots, H].
int64_t quantised_pass_bytes(const DeviceExperts& experts, int64_t max_tokens, int64_t topk);
const float* quantised_pass(const DeviceMoeOps& ops, const DeviceExperts& experts, const DeviceSlots& slots,
                            const DeviceRows& rows, const ActRows& x, Arena& scratch);
// The quantised rows of x [T, K] themselves, of a layer with one static scale or scales per token.
int64_t quantised_rows_bytes(int64_t max_tokens, int64_t k);
DeviceOperand quantise_rows(const DeviceMoeOps& ops, const DeviceExperts& experts, const ActRows& x,
                            Arena& scratch);

}  // namespace fp4moe
