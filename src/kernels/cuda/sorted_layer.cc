#include "kernels/cuda/sorted_layer.h"

#include <algorithm>

#include "kernels/cuda/moe_sort.h"
#include "kernels/cuda/sm90_wide_gemm.h"
#include "kernels/cuda/token_slabs.h"

namespace fp4moe {
namespace {

constexpr int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// The layer's scratch memory, in order.
struct LayerSpace {
  int32_t* ints[6] = {};  // offsets, counts, progress, slot_of_row, row_of_slot, sort's scratch
  uint8_t *x_slabs = nullptr, *h_slabs = nullptr;
  bf16* intermediate = nullptr;
  bf16* y = nullptr;
  int64_t bytes = 0;

  LayerSpace(const TiledExperts& experts, int64_t num_slots, bool in_slabs, uint8_t* memory) {
    const int64_t n = experts.num_experts;
    const int64_t counts[6] = {n + 1, n, n + 1, num_slots, num_slots, kSortBlocks * n};
    const auto take = [&](int64_t size) {
      uint8_t* at = memory == nullptr ? nullptr : memory + bytes;
      bytes += aligned(size);
      return at;
    };
    for (int i = 0; i < 6; ++i) ints[i] = reinterpret_cast<int32_t*>(take(counts[i] * 4));
    if (in_slabs) {
      const int64_t rows = num_slab_rows(num_slots, 0, n);
      x_slabs = take(slabs_bytes(rows, experts.hidden_size * 2));
      h_slabs = take(slabs_bytes(rows, experts.intermediate_size * 2));
    } else {
      intermediate = reinterpret_cast<bf16*>(take(num_slots * experts.intermediate_size * 2));
    }
    y = reinterpret_cast<bf16*>(take(num_slots * experts.hidden_size * 2));
  }
};

}  // namespace

int64_t sorted_layer_workspace_bytes(const TiledExperts& experts, int64_t max_tokens, int64_t topk) {
  return LayerSpace(experts, max_tokens * topk, false, nullptr).bytes;
}
int64_t wide_layer_workspace_bytes(const TiledExperts& experts, int64_t max_tokens, int64_t topk) {
  return LayerSpace(experts, max_tokens * topk, true, nullptr).bytes;
}

namespace {

void run_layer(const DeviceMoeArgs& a, bool in_slabs, void (*gemms)(const DeviceExpertArgs&)) {
  if (a.num_tokens == 0) return;
  const int64_t num_slots = a.num_tokens * a.topk;
  const LayerSpace space(a.experts, num_slots, in_slabs, a.workspace);
  MoeSortArgs sort;
  sort.ids = a.ids;
  sort.num_tokens = a.num_tokens;
  sort.topk = a.topk;
  sort.first_expert = a.first_expert;
  sort.num_experts = a.experts.num_experts;
  sort.rows.max_rows = num_slots;
  sort.rows.offsets = space.ints[0];
  sort.rows.counts = space.ints[1];
  sort.rows.progress = space.ints[2];
  sort.rows.slot_of_row = space.ints[3];
  sort.rows.row_of_slot = space.ints[4];
  sort.scratch = space.ints[5];
  moe_sort(sort);

  DeviceExpertArgs gemm;
  gemm.experts = a.experts;
  gemm.rows = sort.rows;
  gemm.num_tokens = a.num_tokens;
  gemm.topk = a.topk;
  gemm.expected_rows = num_slots / std::max(a.num_routed_experts, a.experts.num_experts);
  gemm.x = {const_cast<bf16*>(a.x), DType::kBF16, a.num_tokens, a.experts.hidden_size};
  gemm.intermediate = {space.intermediate, DType::kBF16, num_slots, a.experts.intermediate_size};
  gemm.h = gemm.intermediate;
  gemm.y_bf16 = space.y;
  if (in_slabs) {
    gather_token_slabs({a.x, sort.rows, a.experts.num_experts, a.topk, a.experts.hidden_size, space.x_slabs});
    gemm.x.data = space.x_slabs;
    gemm.h.data = space.h_slabs;
  }
  gemms(gemm);

  MoeCombineArgs combine;
  combine.y_bf16 = space.y;
  combine.row_of_slot = sort.rows.row_of_slot;
  combine.weights = a.weights;
  combine.num_tokens = a.num_tokens;
  combine.topk = a.topk;
  combine.hidden_size = a.experts.hidden_size;
  combine.out = a.out;
  combine.accumulate = a.accumulate;
  combine.out_bf16 = a.out_bf16;
  moe_combine(combine);
}

}  // namespace

void run_sorted_layer(const DeviceMoeArgs& a, void (*gemms)(const DeviceExpertArgs&)) {
  run_layer(a, false, gemms);
}

void run_wide_layer(const DeviceMoeArgs& a) {
  run_layer(a, true, [](const DeviceExpertArgs& args) {
    sm90_wide_gate_up(args);
    sm90_wide_down(args);
  });
}

}  // namespace fp4moe
