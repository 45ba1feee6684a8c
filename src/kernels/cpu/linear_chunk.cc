// Computes  out[T, N] = x[T, K] W^T (+ bias) (+ out), W in panels of 16 outputs (LinearLayout::kPanel16);
//           head_linear: the same for each head's slice of f32 rows; linear_q8 and linear_fp8: see
//           linear_code_tile.h and, for AMX, linear_code_amx.h.
// Bytes     2 N K of weights, once for all rows of a chunk (TileShape::large_rows at a time, then again from
//           the cache); x and out are small in comparison.
// Flops     2 T N K.
// Bound     memory for T <= 4 (weights stream from DRAM, prefetched); from T = 12 on, the multiply units:
//           tiles on AMX, bf16 dots on AVX-512, f32 FMA elsewhere.
// Numerics  one f32 accumulator per output, pair by pair in ascending k, for every T, tile and chunk.
//           AMX on bf16 rows: tdpbf16ps computes an even and an odd sum over each 32 k, adds the two, then
//           adds the result to the accumulator (subnormals count as zero).
//           AVX-512 on bf16 rows: vdpbf16ps (subnormals count as zero). Otherwise bf16 is decoded exactly,
//           and even k, then odd k, are added with fma (a rounded product and a rounded sum on scalar).
#include "kernels/cpu/dense_chunks.h"
#include "kernels/cpu/linear_code_tile.h"
#include "kernels/cpu/linear_step.h"

#if defined(__AMX_TILE__)
#include "kernels/cpu/linear_code_amx.h"
#include "kernels/cpu/linear_tiles_amx.h"
#endif

namespace fp4moe::FP4MOE_ISA {
namespace {

// A tile of P panels x R rows is kept in registers: P R accumulators of 16 outputs.
struct TileShape {
  int small_rows, small_panels, large_rows, large_panels;
};
#if defined(__AVX512BF16__)
constexpr TileShape kBf16Shape = {4, 4, 12, 2}, kCodeShape = {4, 4, 12, 1};
#elif defined(__AVX2__)
constexpr TileShape kBf16Shape = {1, 2, 4, 1}, kCodeShape = {1, 1, 4, 1};
#else
constexpr TileShape kBf16Shape = {1, 1, 2, 1}, kCodeShape = kBf16Shape;
#endif
constexpr int64_t kPrefetchElems = 1024;  // 2 KiB ahead in each panel's stream

// A tile's inputs, and store(row, panel, sum), which writes its outputs.
struct LinearOutputs {
  const LinearArgs& a;
  const void* x = a.x.data;
  int64_t x_stride = a.x.cols, k = a.x.cols;

  void store(int64_t row, int64_t panel, Vec sum) const {
    const int64_t first = panel * kLanes, n = a.n - first;
    float* out = a.out + row * a.n + first;
    if (a.bias != nullptr) sum = add(sum, load_partial(a.bias + first, n));
    if (a.accumulate) sum = add(sum, load_partial(out, n));
    store_partial(out, sum, n);
  }
};

struct LinearTiles : LinearOutputs {
  static constexpr TileShape kShape = kBf16Shape;
  const bf16* weight = static_cast<const bf16*>(a.weight);
};

// 8-bit weights: the codes of a panel, and the scales of its 16 outputs for a block of kCodeColumns columns.
struct Q8Tiles : LinearOutputs {
  using Codes = Q8Codes;
  static constexpr TileShape kShape = kCodeShape;
  const uint8_t* weight = static_cast<const uint8_t*>(a.weight);
  int64_t panel_bytes = q8_panel_bytes(k), scale_bytes = q8_panel_scale_bytes(k);

  const uint8_t* codes(int64_t panel) const { return weight + panel * panel_bytes + scale_bytes; }
  Vec scales(int64_t panel, int64_t block) const {
    return load(reinterpret_cast<const bf16*>(weight + panel * panel_bytes) + block * kLanes);
  }
};

struct Fp8Tiles : LinearOutputs {
  using Codes = Fp8Codes;
  static constexpr TileShape kShape = kCodeShape;
  int64_t panel_bytes = (k + kCodeColumns - 1) / kCodeColumns * (kCodeColumns * kLanes);
  bool one_scale = a.fp8.col_block >= k;  // for all columns
  int64_t scales_per_row = one_scale ? 1 : (k + a.fp8.col_block - 1) / a.fp8.col_block;
  uint32_t blocks_per_scale = static_cast<uint32_t>(one_scale ? panel_bytes / (kCodeColumns * kLanes)
                                                              : a.fp8.col_block / kCodeColumns);

  const uint8_t* codes(int64_t panel) const { return a.fp8.codes + panel * panel_bytes; }
  Vec scales(int64_t panel, int64_t block) const {
    const int64_t at = panel * scales_per_row + static_cast<uint32_t>(block) / blocks_per_scale;
    return load(a.fp8.scales + at * kLanes);
  }
};

struct HeadTiles {
  static constexpr TileShape kShape = kBf16Shape;
  const HeadLinearArgs& a;
  int64_t head;
  const void* x = a.x + head * a.x_head_stride;
  int64_t x_stride = a.x_stride, k = a.k;
  const bf16* weight = a.weight + head * ((a.n + kLanes - 1) / kLanes) * kLanes * ((a.k + 1) / 2 * 2);

  void store(int64_t row, int64_t panel, Vec sum) const {
    const int64_t first = panel * kLanes, n = a.n - first;
    const int64_t out = row * a.out_stride + head * a.out_head_stride + first;
    sum = mul(sum, broadcast(a.scale));
    if (a.out_dtype == DType::kF32)
      store_partial(static_cast<float*>(a.out) + out, sum, n);
    else
      store_partial(static_cast<bf16*>(a.out) + out, sum, n);
  }
};

template <class Step, int P, int R, class Tiles>
void tile(const Tiles& a, int64_t row, int64_t panel) {
  const int64_t k = a.k, stride = a.x_stride, panel_elems = (k + 1) / 2 * 2 * kLanes;
  const auto* x = static_cast<const typename Step::X*>(a.x) + row * stride;
  const bf16* w = a.weight + panel * panel_elems;
  Vec sums[P][R];
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) sums[p][r] = zero();
  for (int64_t i = 0; i + 1 < k; i += 2, w += 2 * kLanes) {
    typename Step::Weights weights[P];
    for (int p = 0; p < P; ++p) {
      weights[p] = Step::load_weights(w + p * panel_elems);
      if constexpr (R <= Tiles::kShape.small_rows) __builtin_prefetch(w + p * panel_elems + kPrefetchElems);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const auto two = Step::two(x + r * stride + i);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) sums[p][r] = Step::add_two(sums[p][r], two, weights[p]);
    }
  }
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) {
      if (k % 2 != 0)
        sums[p][r] =
            Step::add_last(sums[p][r], x + r * stride + k - 1, Step::load_weights(w + p * panel_elems));
      a.store(row + r, panel + p, sums[p][r]);
    }
}

template <class Step, int P, int R>
void tile(const Q8Tiles& a, int64_t row, int64_t panel) {
  code_tile<Step, P, R>(a, row, panel);
}
template <class Step, int P, int R>
void tile(const Fp8Tiles& a, int64_t row, int64_t panel) {
  code_tile<Step, P, R>(a, row, panel);
}

// Computes the tile of `rows` <= R rows.
template <class Step, int P, int R, class Tiles>
void tile_of_rows(const Tiles& a, int64_t row, int64_t rows, int64_t panel) {
  if (rows == R) return tile<Step, P, R>(a, row, panel);
  if constexpr (R > 1) tile_of_rows<Step, P, R - 1>(a, row, rows, panel);
}

// Computes P panels at a time, then the rest one by one; all rows of the chunk use a panel while it is in the
// cache.
template <class Step, int P, int R, class Tiles>
void tiles(const Tiles& a, const LinearChunk& c) {
  int64_t panel = c.panel_begin;
  auto all_rows = [&](auto tile_fn) {
    for (int64_t row = c.row_begin; row < c.row_end; row += R)
      tile_fn(a, row, c.row_end - row < R ? c.row_end - row : R, panel);
  };
  for (; panel + P <= c.panel_end; panel += P) all_rows(tile_of_rows<Step, P, R, Tiles>);
  for (; panel < c.panel_end; ++panel) all_rows(tile_of_rows<Step, 1, R, Tiles>);
}

template <class Step, class Tiles>
void run(const Tiles& a, const LinearChunk& c) {
  constexpr TileShape kShape = Tiles::kShape;
  if (c.row_end - c.row_begin <= kShape.small_rows)
    tiles<Step, kShape.small_panels, kShape.small_rows>(a, c);
  else
    tiles<Step, kShape.large_panels, kShape.large_rows>(a, c);
}

template <class Tiles>
void run_codes(const Tiles& a, const LinearChunk& c) {
  if (a.a.x.dtype == DType::kF32)
    run<FmaStep<float>>(a, c);
  else
#if defined(__AMX_TILE__)
    run_code_tiles(a, c);
#else
    run<Bf16Step>(a, c);
#endif
}

}  // namespace

void linear_chunk(const LinearArgs& a, const LinearChunk& c) {
  if (a.x.dtype == DType::kF32)
    run<FmaStep<float>>(LinearTiles{{a}}, c);
  else
#if defined(__AMX_TILE__)
    run_tiles(LinearTiles{{a}}, c);
#else
    run<Bf16Step>(LinearTiles{{a}}, c);
#endif
}

void linear_q8_chunk(const LinearArgs& a, const LinearChunk& c) { run_codes(Q8Tiles{{a}}, c); }
void linear_fp8_chunk(const LinearArgs& a, const LinearChunk& c) { run_codes(Fp8Tiles{{a}}, c); }

void head_linear_chunk(const HeadLinearArgs& a, int64_t head, const LinearChunk& c) {
  run<FmaStep<float>>(HeadTiles{a, head}, c);
}

}  // namespace fp4moe::FP4MOE_ISA
