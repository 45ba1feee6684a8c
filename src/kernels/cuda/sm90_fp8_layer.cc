// A whole w4a8 MoE layer: sort, tokens to FP8, gate/up, the intermediate to FP8, down, combine.
#include <algorithm>

#include "base/buffer.h"
#include "kernels/cuda/fp8_tile_layout.h"
#include "kernels/device_act_quant.h"
#include "kernels/device_moe_fp8.h"

namespace fp4moe {
namespace {

// The pieces of the workspace; with base null, only how long it is.
struct LayerSpace {
  int32_t *offsets, *counts, *slot_of_row, *row_of_slot, *sort_scratch;
  uint8_t *x, *h;              // slabs
  float *x_scales, *h_scales;  // [slab rows]
  bf16* intermediate;          // [num_slots, I]
  bf16* y;                     // [num_slots, H]
  int64_t slab_rows, num_bytes;

  LayerSpace(const TiledExperts& t, int64_t num_slots, uint8_t* base) {
    int64_t used = 0;
    const auto take = [&]<class T>(T*& out, int64_t n) {
      out = reinterpret_cast<T*>(base + used);
      used += Arena::padded(n * static_cast<int64_t>(sizeof(T)));
    };
    slab_rows = num_slab_rows(num_slots, 0, t.num_experts);
    take(offsets, t.num_experts + 1);
    take(counts, t.num_experts);
    take(slot_of_row, num_slots);
    take(row_of_slot, num_slots);
    take(sort_scratch, kSortBlocks * t.num_experts);
    take(x, slabs_bytes(slab_rows, t.hidden_size));
    take(h, slabs_bytes(slab_rows, t.intermediate_size));
    take(x_scales, slab_rows);
    take(h_scales, slab_rows);
    take(intermediate, num_slots * t.intermediate_size);
    take(y, num_slots * t.hidden_size);
    num_bytes = used;
  }
};

int64_t layer_workspace_bytes(const TiledExperts& experts, int64_t max_tokens, int64_t topk) {
  return LayerSpace(experts, max_tokens * topk, nullptr).num_bytes;
}

void layer(const DeviceMoeArgs& a) {
  if (a.num_tokens == 0) return;
  const TiledExperts& t = a.experts;
  const DeviceMoeOps& ops = *sm90_moe_ops();
  const int64_t num_slots = a.num_tokens * a.topk;
  const LayerSpace space(t, num_slots, a.workspace);
  const DeviceRows rows = {.max_rows = num_slots,
                           .offsets = space.offsets,
                           .counts = space.counts,
                           .slot_of_row = space.slot_of_row,
                           .row_of_slot = space.row_of_slot};
  ops.sort({.ids = a.ids,
            .num_tokens = a.num_tokens,
            .topk = a.topk,
            .first_expert = a.first_expert,
            .num_experts = t.num_experts,
            .rows = rows,
            .scratch = space.sort_scratch});

  DeviceActQuantArgs quant{.kind = DeviceActQuantKind::kFp8PerToken,
                           .x = {const_cast<bf16*>(a.x), DType::kBF16, a.num_tokens, t.hidden_size},
                           .rows = rows,
                           .num_experts = t.num_experts,
                           .gather = true,
                           .topk = a.topk,
                           .out = {space.x, DType::kF8E4M3, space.slab_rows, t.hidden_size},
                           .row_scales = space.x_scales};
  cuda_quantize_act(quant);
  DeviceExpertArgs gemm{.experts = t, .rows = rows, .num_tokens = a.num_tokens, .topk = a.topk};
  gemm.expected_rows = num_slots / std::max(a.num_routed_experts, t.num_experts);
  gemm.x = quant.out;
  gemm.gather = false;
  gemm.x_row_scales = space.x_scales;
  gemm.intermediate = {space.intermediate, DType::kBF16, num_slots, t.intermediate_size};
  sm90_fp8_gate_up(gemm);

  quant.x = gemm.intermediate;
  quant.gather = false;
  quant.out = {space.h, DType::kF8E4M3, space.slab_rows, t.intermediate_size};
  quant.row_scales = space.h_scales;
  cuda_quantize_act(quant);
  gemm.h = quant.out;
  gemm.h_row_scales = space.h_scales;
  gemm.y_bf16 = space.y;
  sm90_fp8_down(gemm);
  ops.combine({.y_bf16 = space.y,
               .row_of_slot = space.row_of_slot,
               .weights = a.weights,
               .num_tokens = a.num_tokens,
               .topk = a.topk,
               .hidden_size = t.hidden_size,
               .out = a.out,
               .accumulate = a.accumulate,
               .out_bf16 = a.out_bf16});
}

}  // namespace

const DeviceFp8MoeOps* sm90_fp8_moe_ops() {
  static constexpr DeviceFp8MoeOps kOps = {
      .name = "sm90_fp8", .layer = layer, .layer_workspace_bytes = layer_workspace_bytes};
  return &kOps;
}

}  // namespace fp4moe
