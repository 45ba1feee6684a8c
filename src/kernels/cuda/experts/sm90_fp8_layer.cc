// The table of Hopper's MoE ops for w4a8, and its tactics for whole layers. All tactics read FP8 tiles and
// compute the same function; "wide" sums with the FP8 matrix unit's 14 bits or so, the other tactics in f32.
//   wide        sort, quantise tokens to FP8 slabs by expert, gate/up, quantise the intermediate to FP8,
//               down, combine
//   few_tokens  everything in one launch, up to 8 tokens
//   sorted      for few rows per expert: sort and quantise tokens to FP8 values, both GEMMs in one launch,
//               combine
#include "base/buffer.h"
#include "kernels/cuda/experts/few_tokens.h"
#include "kernels/cuda/experts/moe_sort.h"
#include "kernels/cuda/experts/sm90_expert_gemm.h"
#include "kernels/cuda/experts/sorted_layer.h"
#include "kernels/cuda/layout/fp8_tile_layout.h"
#include "kernels/cuda/routing/router.h"
#include "kernels/device_act_quant.h"
#include "kernels/device_moe_fp8.h"

namespace fp4moe {
namespace {

// The pieces of a workspace. If base is null, only the size is computed.
class Space {
 public:
  Space(const TiledExperts& t, int64_t num_slots, uint8_t* base) : base_(base) {
    rows = {.max_rows = num_slots,
            .offsets = take<int32_t>(t.num_experts + 1),
            .counts = take<int32_t>(t.num_experts),
            .slot_of_row = take<int32_t>(num_slots),
            .row_of_slot = take<int32_t>(num_slots),
            .progress = take<int32_t>(t.num_experts + 1)};
    sort_scratch = take<int32_t>(kSortBlocks * t.num_experts);
    intermediate = {take<bf16>(num_slots * t.intermediate_size), DType::kBF16, num_slots,
                    t.intermediate_size};
    y = take<bf16>(num_slots * t.hidden_size);
  }
  template <class T>
  T* take(int64_t n) {
    T* at = reinterpret_cast<T*>(base_ + num_bytes);
    num_bytes += Arena::padded(n * static_cast<int64_t>(sizeof(T)));
    return at;
  }

  int64_t num_bytes = 0;
  DeviceRows rows;
  int32_t* sort_scratch;
  ActRows intermediate;  // [num_slots, I]
  bf16* y;               // [num_slots, H]

 private:
  uint8_t* base_;
};

DeviceExpertArgs gemm_args(const DeviceMoeArgs& a, const Space& space) {
  DeviceExpertArgs gemm = layer_gemm_args(a, space.rows);
  gemm.intermediate = space.intermediate;
  gemm.y_bf16 = layer_y(a, space.y);
  return gemm;
}

// ---- wide ----------------------------------------------------------------------------------------

struct WideSpace : Space {
  WideSpace(const TiledExperts& t, int64_t num_slots, uint8_t* base) : Space(t, num_slots, base) {
    const int64_t slab_rows = num_slab_rows(num_slots, 0, t.num_experts);
    x = {take<uint8_t>(slabs_bytes(slab_rows, t.hidden_size)), DType::kF8E4M3, slab_rows, t.hidden_size};
    h = {take<uint8_t>(slabs_bytes(slab_rows, t.intermediate_size)), DType::kF8E4M3, slab_rows,
         t.intermediate_size};
    x_scales = take<float>(slab_rows);
    h_scales = take<float>(slab_rows);
  }
  ActRows x, h;                // slabs
  float *x_scales, *h_scales;  // [slab rows]
};

void wide_layer(const DeviceMoeArgs& a) {
  if (a.num_tokens == 0) return;
  const WideSpace space(a.experts, a.num_tokens * a.topk, a.workspace);
  moe_sort(layer_sort_args(a, space.rows, space.sort_scratch));
  DeviceActQuantArgs quant{.kind = DeviceActQuantKind::kFp8PerToken,
                           .x = {const_cast<bf16*>(a.x), DType::kBF16, a.num_tokens, a.experts.hidden_size},
                           .rows = space.rows,
                           .num_experts = a.experts.num_experts,
                           .gather = true,
                           .topk = a.topk,
                           .out = space.x,
                           .row_scales = space.x_scales};
  cuda_quantize_act(quant);
  DeviceExpertArgs gemm = gemm_args(a, space);
  gemm.x = space.x;
  gemm.gather = false;
  gemm.x_row_scales = space.x_scales;
  sm90_fp8_gate_up(gemm);
  quant.x = space.intermediate;
  quant.gather = false;
  quant.out = space.h;
  quant.row_scales = space.h_scales;
  cuda_quantize_act(quant);
  gemm.h = space.h;
  gemm.h_row_scales = space.h_scales;
  sm90_fp8_down(gemm);
  combine_layer(a, gemm);
}

// ---- sorted --------------------------------------------------------------------------------------

struct SortedSpace : Space {
  SortedSpace(const TiledExperts& t, int64_t num_tokens, int64_t topk, uint8_t* base)
      : Space(t, num_tokens * topk, base) {
    x = {take<uint16_t>(num_tokens * t.hidden_size), DType::kF16, num_tokens, t.hidden_size};
    x_scales = take<float>(num_tokens);
    h_scales = take<float>(num_tokens * topk);
  }
  ActRows x;                   // [T, H] f16 values of e4m3 codes
  float *x_scales, *h_scales;  // [T], [num_slots]
};

void sorted_layer(const DeviceMoeArgs& a) {
  if (a.num_tokens == 0) return;
  const SortedSpace space(a.experts, a.num_tokens, a.topk, a.workspace);
  moe_sort_and_quantize(layer_sort_args(a, space.rows, space.sort_scratch),
                        {.x = a.x,
                         .num_tokens = a.num_tokens,
                         .hidden_size = a.experts.hidden_size,
                         .values = static_cast<uint16_t*>(space.x.data),
                         .scales = space.x_scales});
  DeviceExpertArgs gemm = gemm_args(a, space);
  gemm.x = space.x;
  gemm.x_row_scales = space.x_scales;
  gemm.h = space.intermediate;
  gemm.h_row_scales = space.h_scales;
  gemm.returns = layer_returns(a);
  sm90_fp8_few_gate_up_down(gemm, space.h_scales);
  combine_layer(a, gemm);
}

// ---- the table -----------------------------------------------------------------------------------

// "wide" is first because --enable-deterministic-inference uses the first tactic for batches of all sizes.
constexpr DeviceMoeTactic kTactics[] = {
    {.name = "wide",
     .fits = sorted_layer_fits,
     .layer = wide_layer,
     .workspace_bytes = [](const TiledExperts& experts, int64_t max_tokens,
                           int64_t topk) { return WideSpace(experts, max_tokens * topk, nullptr).num_bytes; },
     .leaves_rows = true},
    {.name = "few_tokens",
     .fits = [](const DeviceMoeArgs& a) { return few_tokens_fits(a, FewWeights::kFp8); },
     .layer = [](const DeviceMoeArgs& a) { few_tokens_layer(a, FewWeights::kFp8); },
     .workspace_bytes = [](const TiledExperts& experts, int64_t,
                           int64_t topk) { return few_tokens_workspace_bytes(experts, topk); }},
    {.name = "sorted",
     .fits = sorted_layer_fits,
     .layer = sorted_layer,
     .workspace_bytes =
         [](const TiledExperts& experts, int64_t max_tokens, int64_t topk) {
           return SortedSpace(experts, max_tokens, topk, nullptr).num_bytes;
         },
     .leaves_rows = true}};
enum : size_t { kWide, kFewTokens, kSorted };

// Measured on an H200: the FP8 matrix unit becomes the fastest at fewer rows than w4a16's wide tiles do.
size_t default_tactic(const DeviceMoeArgs& args) {
  return tactic_by_size(args, {FewWeights::kFp8, /*wide_rows=*/20, kFewTokens, kWide, kSorted});
}

constexpr DeviceMoeOps kSm90Fp8MoeOps = {.name = "sm90_fp8",
                                         .tile_rows_alignment = 8,
                                         .sort = moe_sort,
                                         .gate_up = sm90_fp8_gate_up,
                                         .down = sm90_fp8_down,
                                         .combine = moe_combine,
                                         .tactics = kTactics,
                                         .default_tactic = default_tactic,
                                         .route = cuda_route,
                                         .route_fuses_norm = cuda_route_fuses_norm,
                                         .route_sends = cuda_route_sends,
                                         .quantize = cuda_quantize_act,
                                         .direct_fits = kTactics[kFewTokens].fits,
                                         .direct = kTactics[kFewTokens].layer};

}  // namespace

const DeviceMoeOps* sm90_fp8_moe_ops() { return &kSm90Fp8MoeOps; }

}  // namespace fp4moe
