// Building blocks of GPU layers: sorting rows, and the expert GEMMs on quantised operands.
#pragma once

#include <cstdint>

#include "base/buffer.h"
#include "kernels/device_act_quant.h"
#include "kernels/device_moe.h"
#include "moe/device/device_experts.h"

namespace fp4moe {

// Tokens and their experts.
struct DeviceSlots {
  const int32_t* ids = nullptr;  // [T, topk] in device memory; null: all slots go to the first expert
  int64_t num_tokens = 0, topk = 1, first_expert = 0;
  int64_t num_routed_experts = 0;        // see DeviceMoeArgs
  SharedSlot shared;                     // not in num_slots()
  AddedRows added;                       // added to the output
  WeightBytes next;                      // see DeviceMoeArgs
  MoeCombineArgs* uncombined = nullptr;  // see DeviceMoeArgs
  PartialsToSend* send = nullptr;        // see DeviceMoeArgs
  int64_t num_slots() const { return num_tokens * topk; }
};

// Scratch bytes of sort_rows().
int64_t device_rows_bytes(int64_t num_slots, int64_t num_experts);
// Sorts the slots by expert; the result is in scratch memory.
DeviceRows sort_rows(const DeviceMoeOps& ops, const DeviceSlots& slots, int64_t num_experts, Arena& scratch);

// The input of a w4a4 layer: bf16 rows, or rows of NVFP4 values and the scales that multiply their sums.
struct QuantisedPassInput {
  ActRows x;                // [T, H] bf16
  bool x_is_nvfp4 = false;  // code * block scale
  const float* row_scales =
      nullptr;  // [T], only with x_is_nvfp4; null: the layer's scalar a1, as part of alpha
};

// Runs both GEMMs of w4a4 over the sorted rows of `input`. Returns the rows' outputs [num_slots, H] f32,
// without router weights, in scratch memory.
int64_t quantised_pass_bytes(const DeviceExperts& experts, int64_t max_tokens, int64_t topk);
const float* quantised_pass(const DeviceMoeOps& ops, const DeviceExperts& experts, const DeviceSlots& slots,
                            const DeviceRows& rows, const QuantisedPassInput& input, Arena& scratch);

// Runs the down GEMM with one matrix on the tokens in order, in any scheme: out [T, N] f32 = x W^T + bias.
int64_t linear_pass_bytes(const DeviceExperts& matrix, int64_t max_tokens);
void linear_pass(const DeviceMoeOps& ops, const DeviceExperts& matrix, const ActRows& x, float* out,
                 Arena& scratch);

}  // namespace fp4moe
