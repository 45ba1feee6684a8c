#include "kernels/cuda/experts/sorted_layer.h"

#include <algorithm>

#include "kernels/cuda/experts/moe_sort.h"
#include "kernels/cuda/experts/sm90_wide_gemm.h"
#include "kernels/cuda/layout/token_slabs.h"
#include "kernels/device_a2a.h"

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

  // num_rows: of all experts, with a shared one's.
  LayerSpace(const TiledExperts& experts, int64_t num_rows, bool in_slabs, uint8_t* memory) {
    const int64_t n = experts.num_experts;
    const int64_t counts[6] = {n + 1, n + 1, n + 2, num_rows, num_rows, kSortBlocks * n};
    const auto take = [&](int64_t size) {
      uint8_t* at = memory == nullptr ? nullptr : memory + bytes;
      bytes += aligned(size);
      return at;
    };
    for (int i = 0; i < 6; ++i) ints[i] = reinterpret_cast<int32_t*>(take(counts[i] * 4));
    if (in_slabs) {
      const int64_t rows = num_slab_rows(num_rows, 0, n);
      x_slabs = take(slabs_bytes(rows, experts.hidden_size * 2));
      h_slabs = take(slabs_bytes(rows, experts.intermediate_size * 2));
    } else {
      intermediate = reinterpret_cast<bf16*>(take(num_rows * experts.intermediate_size * 2));
    }
    y = reinterpret_cast<bf16*>(take(num_rows * experts.hidden_size * 2));
  }
};

}  // namespace

size_t tactic_by_size(const DeviceMoeArgs& args, const TacticRule& rule) {
  constexpr double kFewTokensBytes = 375e6;  // measured on an H200
  const TiledExperts& e = args.experts;
  const int64_t pairs = args.num_tokens * args.topk,
                experts = std::max(args.num_routed_experts, e.num_experts);
  const auto local =
      static_cast<double>(pairs) * static_cast<double>(e.num_experts) / static_cast<double>(experts);
  const auto expert_bytes = static_cast<double>(3 * e.hidden_size * e.intermediate_size / 2);
  if (few_tokens_fits(args, rule.weights) && local * expert_bytes <= kFewTokensBytes) return rule.few_tokens;
  return pairs > rule.wide_rows * experts ? rule.wide : rule.sorted;
}

MoeSortArgs layer_sort_args(const DeviceMoeArgs& args, const DeviceRows& rows, int32_t* scratch) {
  return {.ids = args.ids,
          .num_tokens = args.num_tokens,
          .topk = args.topk,
          .first_expert = args.first_expert,
          .num_experts = args.experts.num_experts,
          .has_shared = args.shared.exists,
          .rows = rows,
          .scratch = scratch};
}

DeviceExpertArgs layer_gemm_args(const DeviceMoeArgs& args, const DeviceRows& rows) {
  const int64_t num_slots = args.num_tokens * args.topk;
  DeviceExpertArgs gemm{
      .experts = args.experts,
      .rows = rows,
      .num_tokens = args.num_tokens,
      .topk = args.topk,
      .expected_rows = num_slots / std::max(args.num_routed_experts, args.experts.num_experts)};
  if (args.shared.exists) ++gemm.experts.num_experts;
  return gemm;
}

bf16* layer_y(const DeviceMoeArgs& args, bf16* scratch) {
  const bool rows_are_tokens = args.ids == nullptr && args.topk == 1 && args.weights == nullptr;
  const bool is_only_output = args.out == nullptr && args.out_bf16 != nullptr && args.exchange == nullptr;
  return rows_are_tokens && is_only_output ? args.out_bf16 : scratch;
}

const A2aRound* layer_returns(const DeviceMoeArgs& args) {
  const A2aRound* const round = args.exchange;
  if (round == nullptr || !round->shape.allows_returned_rows() || round->group.plane != nullptr)
    return nullptr;
  return round;
}

namespace {

AddedRows shared_rows(const DeviceMoeArgs& args, const DeviceExpertArgs& gemm) {
  return {.rows_bf16 = gemm.y_bf16 + args.num_tokens * args.topk * args.experts.hidden_size,
          .gate = args.shared.gate,
          .x = args.shared.x};
}

}  // namespace

void combine_layer(const DeviceMoeArgs& args, const DeviceExpertArgs& gemm) {
  if (gemm.y_bf16 == args.out_bf16) return;
  if (gemm.returns != nullptr)
    return cuda_a2a_ops()->combine(*args.exchange, {.are_returned = true}, args.out);
  if (args.exchange != nullptr)
    return cuda_a2a_ops()->combine(*args.exchange,
                                   {.y_bf16 = gemm.y_bf16, .row_of_slot = gemm.rows.row_of_slot}, args.out);
  const MoeCombineArgs combine{.y_bf16 = gemm.y_bf16,
                               .row_of_slot = gemm.rows.row_of_slot,
                               .weights = args.weights,
                               .num_tokens = args.num_tokens,
                               .topk = args.topk,
                               .hidden_size = args.experts.hidden_size,
                               .out = args.out,
                               .accumulate = args.accumulate,
                               .out_bf16 = args.out_bf16,
                               .added = args.shared.exists ? shared_rows(args, gemm) : args.added};
  if (args.uncombined == nullptr) return moe_combine(combine);
  *args.uncombined = combine;
}

int64_t sorted_layer_workspace_bytes(const TiledExperts& experts, int64_t max_tokens, int64_t topk) {
  return LayerSpace(experts, max_tokens * topk, false, nullptr).bytes;
}
int64_t wide_layer_workspace_bytes(const TiledExperts& experts, int64_t max_tokens, int64_t topk) {
  return LayerSpace(experts, max_tokens * topk, true, nullptr).bytes;
}

namespace {

// How a layer runs its GEMMs.
struct LayerGemms {
  void (*run)(const DeviceExpertArgs&);
  bool in_slabs = false;    // from gathered slabs
  bool may_return = false;  // takes DeviceExpertArgs::returns
};

void run_layer(const DeviceMoeArgs& a, const LayerGemms& gemms) {
  if (a.num_tokens == 0) return;
  const int64_t num_rows = a.num_tokens * (a.topk + (a.shared.exists ? 1 : 0));
  const LayerSpace space(a.experts, num_rows, gemms.in_slabs, a.workspace);
  const DeviceRows rows{.max_rows = num_rows,
                        .offsets = space.ints[0],
                        .counts = space.ints[1],
                        .slot_of_row = space.ints[3],
                        .row_of_slot = space.ints[4],
                        .progress = space.ints[2]};
  moe_sort(layer_sort_args(a, rows, space.ints[5]));

  DeviceExpertArgs gemm = layer_gemm_args(a, rows);
  gemm.x = {const_cast<bf16*>(a.x), DType::kBF16, a.num_tokens, a.experts.hidden_size};
  gemm.intermediate = {space.intermediate, DType::kBF16, num_rows, a.experts.intermediate_size};
  gemm.h = gemm.intermediate;
  gemm.y_bf16 = layer_y(a, space.y);
  if (gemms.may_return) gemm.returns = layer_returns(a);
  if (gemms.in_slabs) {
    gather_token_slabs({.x = a.x,
                        .rows = rows,
                        .num_experts = a.experts.num_experts,
                        .num_tokens = a.num_tokens,
                        .topk = a.topk,
                        .cols = a.experts.hidden_size,
                        .slabs = space.x_slabs});
    gemm.x.data = space.x_slabs;
    gemm.h.data = space.h_slabs;
  }
  gemms.run(gemm);
  combine_layer(a, gemm);
}

}  // namespace

void run_sorted_layer(const DeviceMoeArgs& a, void (*gemms)(const DeviceExpertArgs&), bool may_return) {
  run_layer(a, {.run = gemms, .may_return = may_return});
}

void run_wide_layer(const DeviceMoeArgs& a) {
  const auto gemms = [](const DeviceExpertArgs& args) {
    sm90_wide_gate_up(args);
    sm90_wide_down(args);
  };
  run_layer(a, {.run = gemms, .in_slabs = true});
}

}  // namespace fp4moe
