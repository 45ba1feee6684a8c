#include "moe/device/device_pass.h"

#include <algorithm>

#include "kernels/cuda/layout/fp8_tile_layout.h"

namespace fp4moe {
namespace {

ActRows take_rows(Arena& scratch, int64_t rows, int64_t cols, DType dtype) {
  return {scratch.take<uint8_t>(rows * cols * dtype_bits(dtype) / 8), dtype, rows, cols};
}

int64_t rows_bytes(int64_t rows, int64_t cols, DType dtype) {
  return Arena::padded(rows * cols * dtype_bits(dtype) / 8);
}

bool is_fp8(const DeviceExperts& experts) { return experts.numerics().scheme == Scheme::kW4A8; }

// Type from which w4a4 quantises the intermediate.
DType intermediate_dtype(const DeviceExperts& experts) {
  return experts.numerics().intermediate == IntermediateRounding::kDirect ? DType::kF32 : DType::kBF16;
}

// A quantised operand.
struct Operand {
  ActRows rows;
  float* scales = nullptr;  // [rows] or null
};

int64_t operand_bytes(const DeviceExperts& experts, int64_t rows, int64_t cols) {
  const int64_t slab_rows = num_slab_rows(rows, 0, experts.tiles().num_experts);
  if (is_fp8(experts)) return Arena::padded(slabs_bytes(slab_rows, cols)) + Arena::padded(slab_rows * 4);
  return rows_bytes(rows, cols, DType::kBF16) + Arena::padded(rows * 4);
}

// A quantiser's tensor scale.
struct QuantScale {
  ActScaleChoice choice;
  const float* encode;  // [L] in device memory
};

Operand take_operand(const DeviceExperts& experts, const QuantScale& scale, int64_t rows, int64_t cols,
                     Arena& scratch) {
  if (is_fp8(experts)) {
    const int64_t slab_rows = num_slab_rows(rows, 0, experts.tiles().num_experts);
    uint8_t* slabs = scratch.take<uint8_t>(slabs_bytes(slab_rows, cols));
    return {{slabs, DType::kF8E4M3, slab_rows, cols}, scratch.take<float>(slab_rows)};
  }
  const ActRows out = take_rows(scratch, rows, cols, DType::kBF16);
  return {out, scale.choice == ActScaleChoice::kPerToken ? scratch.take<float>(rows) : nullptr};
}

DeviceActQuantArgs quant_args(const DeviceExperts& experts, const QuantScale& scale, const ActRows& x,
                              const Operand& to) {
  const DeviceActQuantKind kind = is_fp8(experts) ? DeviceActQuantKind::kFp8PerToken
                                  : scale.choice == ActScaleChoice::kPerToken
                                      ? DeviceActQuantKind::kNvfp4PerToken
                                      : DeviceActQuantKind::kNvfp4Static;
  return {.kind = kind,
          .x = x,
          .num_experts = experts.tiles().num_experts,
          .scales = scale.encode,
          .per_expert = scale.choice == ActScaleChoice::kPerExpert,
          .out = to.rows,
          .row_scales = to.scales};
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

int64_t quantised_pass_bytes(const DeviceExperts& experts, int64_t max_tokens, int64_t topk) {
  const TiledExperts& t = experts.tiles();
  const int64_t slots = max_tokens * topk;
  return operand_bytes(experts, max_tokens, t.hidden_size) +
         rows_bytes(slots, t.intermediate_size, intermediate_dtype(experts)) +
         operand_bytes(experts, slots, t.intermediate_size) + Arena::padded(slots * t.hidden_size * 4);
}

const float* quantised_pass(const DeviceMoeOps& ops, const DeviceExperts& experts, const DeviceSlots& slots,
                            const DeviceRows& rows, const QuantisedPassInput& input, Arena& scratch) {
  const TiledExperts& t = experts.tiles();
  const int64_t num_slots = slots.num_slots();
  const QuantScale a1 = {experts.numerics().a1, experts.a1()}, a2 = {experts.numerics().a2, experts.a2()};
  // Each token is quantised once; the GEMM gathers the rows.
  DeviceExpertArgs args{.experts = t,
                        .rows = rows,
                        .num_tokens = slots.num_tokens,
                        .topk = slots.topk,
                        .x = input.x,
                        .x_row_scales = input.row_scales};
  if (!input.x_is_nvfp4) {
    const Operand in = take_operand(experts, a1, input.x.rows, input.x.cols, scratch);
    ops.quantize(quant_args(experts, a1, input.x, in));
    args.x = in.rows;
    args.x_row_scales = in.scales;
  }
  args.intermediate = take_rows(scratch, num_slots, t.intermediate_size, intermediate_dtype(experts));
  ops.gate_up(args);
  const Operand h = take_operand(experts, a2, num_slots, t.intermediate_size, scratch);
  DeviceActQuantArgs quant_h = quant_args(experts, a2, args.intermediate, h);
  quant_h.rows = rows;
  ops.quantize(quant_h);
  args.h = h.rows;
  args.h_row_scales = h.scales;
  args.y = scratch.take<float>(num_slots * t.hidden_size);
  ops.down(args);
  return args.y;
}

int64_t linear_pass_bytes(const DeviceExperts& matrix, int64_t max_tokens) {
  const TiledExperts& t = matrix.tiles();
  return device_rows_bytes(max_tokens, 1) + operand_bytes(matrix, max_tokens, t.intermediate_size) +
         rows_bytes(max_tokens, t.hidden_size, DType::kBF16);
}

void linear_pass(const DeviceMoeOps& ops, const DeviceExperts& matrix, const ActRows& x, float* out,
                 Arena& scratch) {
  const DeviceRows rows = sort_rows(ops, {nullptr, x.rows}, 1, scratch);
  DeviceExpertArgs args{
      .experts = matrix.tiles(), .rows = rows, .num_tokens = x.rows, .gather = false, .h = x};
  if (matrix.numerics().scheme != Scheme::kW4A16) {
    const QuantScale a1 = {matrix.numerics().a1, matrix.a1()};
    const Operand in = take_operand(matrix, a1, x.rows, x.cols, scratch);
    DeviceActQuantArgs quant = quant_args(matrix, a1, x, in);
    if (is_fp8(matrix)) quant.rows = rows;
    ops.quantize(quant);
    args.h = in.rows;
    args.h_row_scales = in.scales;
  }
  if (!is_fp8(matrix)) {
    args.y = out;
    return ops.down(args);
  }
  args.y_bf16 = scratch.take<bf16>(x.rows * matrix.tiles().hidden_size);
  ops.down(args);
  ops.combine({.y_bf16 = args.y_bf16,
               .row_of_slot = rows.row_of_slot,
               .num_tokens = x.rows,
               .topk = 1,
               .hidden_size = matrix.tiles().hidden_size,
               .out = out});
}

}  // namespace fp4moe
