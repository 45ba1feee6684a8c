#include "moe/device_pass.h"

namespace fp4moe {
namespace {

DType intermediate_dtype(const Numerics& n) {
  return n.intermediate == IntermediateRounding::kBf16First ? DType::kBF16 : DType::kF32;
}

DeviceActQuantKind quant_kind(ActScaleChoice choice) {
  return choice == ActScaleChoice::kPerToken ? DeviceActQuantKind::kNvfp4PerToken
                                             : DeviceActQuantKind::kNvfp4Static;
}

ActRows take_rows(Arena& scratch, int64_t rows, int64_t cols, DType dtype) {
  return {scratch.take<uint8_t>(rows * cols * dtype_bits(dtype) / 8), dtype, rows, cols};
}

int64_t rows_bytes(int64_t rows, int64_t cols, DType dtype) {
  return Arena::padded(rows * cols * dtype_bits(dtype) / 8);
}

}  // namespace

int64_t device_rows_bytes(int64_t num_slots, int64_t num_experts) {
  return Arena::padded((num_experts + 1) * 4) + Arena::padded(num_experts * 4) +
         2 * Arena::padded(num_slots * 4) + Arena::padded(kSortBlocks * num_experts * 4);
}

DeviceRows sort_rows(const DeviceMoeOps& ops, const DeviceSlots& slots, int64_t num_experts, Arena& scratch) {
  const DeviceRows rows = {.max_rows = slots.num_slots(),
                           .offsets = scratch.take<int32_t>(num_experts + 1),
                           .counts = scratch.take<int32_t>(num_experts),
                           .slot_of_row = scratch.take<int32_t>(slots.num_slots()),
                           .row_of_slot = scratch.take<int32_t>(slots.num_slots())};
  ops.sort({.ids = slots.ids,
            .num_tokens = slots.num_tokens,
            .topk = slots.topk,
            .first_expert = slots.first_expert,
            .num_experts = num_experts,
            .rows = rows,
            .scratch = scratch.take<int32_t>(kSortBlocks * num_experts)});
  return rows;
}

int64_t quantised_rows_bytes(int64_t max_tokens, int64_t k) {
  return rows_bytes(max_tokens, k, DType::kBF16) + Arena::padded(max_tokens * 4);
}

DeviceOperand quantise_rows(const DeviceMoeOps& ops, const DeviceExperts& experts, const ActRows& x,
                            Arena& scratch) {
  const bool per_token = experts.numerics().a1 == ActScaleChoice::kPerToken;
  const ActRows out = take_rows(scratch, x.rows, x.cols, DType::kBF16);
  float* row_scales = per_token ? scratch.take<float>(x.rows) : nullptr;
  ops.quantize({.kind = quant_kind(experts.numerics().a1),
                .x = x,
                .scales = experts.a1(),
                .out = out,
                .row_scales = row_scales});
  return {out, row_scales};
}

int64_t quantised_pass_bytes(const DeviceExperts& experts, int64_t max_tokens, int64_t topk) {
  const TiledExperts& t = experts.tiles();
  const int64_t slots = max_tokens * topk;
  return quantised_rows_bytes(max_tokens, t.hidden_size) + quantised_rows_bytes(slots, t.intermediate_size) +
         rows_bytes(slots, t.intermediate_size, intermediate_dtype(experts.numerics())) +
         Arena::padded(slots * t.hidden_size * 4);
}

const float* quantised_pass(const DeviceMoeOps& ops, const DeviceExperts& experts, const DeviceSlots& slots,
                            const DeviceRows& rows, const ActRows& x, Arena& scratch) {
  const Numerics& n = experts.numerics();
  const TiledExperts& t = experts.tiles();
  const int64_t num_slots = slots.num_slots();
  const DeviceOperand in = quantise_rows(ops, experts, x, scratch);
  DeviceExpertArgs args{.experts = t,
                        .rows = rows,
                        .num_tokens = slots.num_tokens,
                        .topk = slots.topk,
                        .x = in.rows,
                        .x_row_scales = in.row_scales};
  args.intermediate = take_rows(scratch, num_slots, t.intermediate_size, intermediate_dtype(n));
  ops.gate_up(args);
  const bool per_token = n.a2 == ActScaleChoice::kPerToken;
  float* h_scales = per_token ? scratch.take<float>(num_slots) : nullptr;
  args.h = take_rows(scratch, num_slots, t.intermediate_size, DType::kBF16);
  args.h_row_scales = h_scales;
  ops.quantize({.kind = quant_kind(n.a2),
                .x = args.intermediate,
                .rows = rows,
                .num_experts = t.num_experts,
                .scales = experts.a2(),
                .per_expert = n.a2 == ActScaleChoice::kPerExpert,
                .out = args.h,
                .row_scales = h_scales});
  float* y = scratch.take<float>(num_slots * t.hidden_size);
  args.y = y;
  ops.down(args);
  return y;
}

}  // namespace fp4moe
