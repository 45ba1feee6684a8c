// The expert and router ops of one ISA; compiled once for each ISA, in its own namespace and with its flags.
// Nothing here may call inline functions of other headers: the linker could keep this ISA's copy for
// every ISA.
//
// Computes  gate_up: out[t, n] = activation(gate_n . x_t, up_n . x_t); down: out[t, n] = w_n . x_t + bias_n;
//           router_logits: out[t, e] = w_e . x_t + bias_e. x is cut into tiles of at most max_rows() rows;
//           expert_dot (expert_dot_*.h) computes a tile's sums with one or two panels.
// Shapes    x [T, K] of one expert: bf16, or kI8 codes with scales per block; some panels of 16 weight rows
//           (expert_panel.h), N = 16 * number of panels; out [T, N], bf16 or f32 from gate_up (N / 2 columns
//           if gated), f32 from down. Router: x [T, H] f32, one panel of 16 experts in bf16.
// Bytes     the panels once per tile of rows, N K (1/2 + 1/G); x, from the cache, once per step of one or
//           two panels; out once. Router: 32 H of weights, read again from the cache for each token.
// Flops     2 T N K; activation, scales and bias cost little in comparison. Router: 32 T H.
// Bound     that of the ISA's expert_dot: memory for few rows, then the multipliers or the decoding.
// Numerics  y = sum * tensor scale (* row scale) + bias, each operation rounded to f32; then the activation
//           in f32, exp within 2.5e-7 (vec.h). A sum has the same order for every T, tile and chunk. Router:
//           four f32 sums (h mod 4) with fma, (0 + 1) + (2 + 3), then the bias.
#include "kernels/expert_ops.h"

#include "kernels/cpu/vec.h"

#if defined(__AMX_TILE__)
#include "kernels/cpu/expert_dot_amx.h"
#include "kernels/cpu/expert_dot_int8_amx.h"
#elif defined(__AVX512BF16__)
#include "kernels/cpu/expert_dot_avx512.h"
#else
#include "kernels/cpu/expert_dot_f32.h"
#endif

#define FP4MOE_STRING_(x) #x
#define FP4MOE_STRING(x) FP4MOE_STRING_(x)

namespace fp4moe::FP4MOE_ISA {
namespace {

using Lanes = float[kPanelRows];  // one value for each row of a panel
// Sums of one panel, or of two side by side.
using DotFn = void (*)(const uint8_t* panels, int64_t k, const void* x, const Int8Blocks&, Lanes* const* out);

// Returns expert_dot for num_rows rows, or null if num_rows > NT.
template <Fp4Format F, bool kInt8, int P, int NT>
DotFn dot_of(int64_t num_rows) {
  if constexpr (NT == 0)
    return nullptr;
  else
    return num_rows == NT ? expert_dot<F, kInt8, NT, P> : dot_of<F, kInt8, P, NT - 1>(num_rows);
}

#if defined(__AMX_TILE__)
constexpr int64_t kMaxRows = kMaxTileTokens;
bool goes_by_tiles(const ExpertGemmArgs& g, int64_t rows) {
  return g.x.dtype != DType::kI8 || (g.format == Fp4Format::kMxfp4 && rows >= kMinInt8TileRows);
}
#else
constexpr int64_t kMaxRows = kMaxTokens;
bool goes_by_tiles(const ExpertGemmArgs&, int64_t) { return false; }
#endif
int64_t max_rows(const ExpertGemmArgs& g) { return goes_by_tiles(g, g.x.rows) ? kMaxRows : kMaxTokens; }

using PanelSums = Lanes[kMaxRows];

template <Fp4Format F>
DotFn dot_of(bool int8, int64_t num_rows) {
  return int8 ? dot_of<F, true, 1, kMaxTokens>(num_rows) : dot_of<F, false, 1, kMaxTokens>(num_rows);
}

DotFn pair_of(Fp4Format format, int64_t num_rows) {
  return format == Fp4Format::kMxfp4 ? dot_of<Fp4Format::kMxfp4, true, 2, kMaxPairTokens>(num_rows)
                                     : dot_of<Fp4Format::kNvfp4, true, 2, kMaxPairTokens>(num_rows);
}

// Multiplies a tile of x's rows by one or two consecutive panels. The constructor chooses how:
//
//   x      rows of the tile             one panel               two panels
//   bf16   any, without AMX             dot                     dot, dot
//   bf16   any, with AMX                expert_dot_tiles        expert_dot_tiles
//   kI8    up to kMaxPairTokens         dot                     pair, which reads x once
//   kI8    more                         dot                     dot, dot
//   kI8    kMinInt8TileRows or more,    expert_dot_int8_tiles   expert_dot_int8_tiles
//          with AMX and MXFP4
//
// dot is null if AMX tiles do the work; the tiles stay configured during the object's lifetime.
struct TileDot {
  DotFn dot = nullptr, pair = nullptr;
  int64_t k, panel_bytes, num_rows;
  const uint8_t* x;
  Int8Blocks x_blocks;

  TileDot(const ExpertGemmArgs& g, int64_t first_row, int64_t rows)
      : k(g.x.cols), panel_bytes(expert_panel_bytes(g.format, k)), num_rows(rows) {
    const bool int8 = g.x.dtype == DType::kI8, mxfp4 = g.format == Fp4Format::kMxfp4;
    if (int8 != (g.x_block_scales != nullptr)) __builtin_trap();  // the caller broke expert_ops.h's rule
    x = static_cast<const uint8_t*>(g.x.data) + first_row * k * (int8 ? 1 : 2);
    const int64_t first_block = first_row * (k / (mxfp4 ? 32 : 16));
    if (int8) x_blocks = {g.x_block_scales + first_block, g.x_block_starts + first_block};
    if (int8) pair = pair_of(g.format, num_rows);
    if (!goes_by_tiles(g, num_rows))
      dot = mxfp4 ? dot_of<Fp4Format::kMxfp4>(int8, num_rows) : dot_of<Fp4Format::kNvfp4>(int8, num_rows);
#if defined(__AMX_TILE__)
    if (dot == nullptr) configure_tiles(RowTiles(num_rows).height, int8 ? kBlockColumns : 2 * kTileColumns);
#endif
  }
#if defined(__AMX_TILE__)
  ~TileDot() {
    if (dot == nullptr) _tile_release();
  }
#endif
  TileDot(const TileDot&) = delete;
  TileDot& operator=(const TileDot&) = delete;

  // Computes out[p], the sums of panel `panel + p`.
  void multiply(const ExpertGemmArgs& g, int64_t panel, int64_t num_panels, PanelSums* out) const {
    const uint8_t* panels = g.panels + panel * panel_bytes;
#if defined(__AMX_TILE__)
    if (dot == nullptr) return multiply_tiles(g.format, panels, num_panels, out);
#endif
    Lanes* const to[2] = {out[0], out[num_panels - 1]};
    if (pair != nullptr && num_panels == 2) return pair(panels, k, x, x_blocks, to);
    for (int64_t p = 0; p < num_panels; ++p) dot(panels + p * panel_bytes, k, x, x_blocks, to + p);
  }

#if defined(__AMX_TILE__)
  void multiply_tiles(Fp4Format format, const uint8_t* panels, int64_t num_panels, PanelSums* out) const {
    const RowTiles tiles(num_rows);
    if (x_blocks.scales != nullptr) {
      const auto* codes = reinterpret_cast<const int8_t*>(x);
      return expert_dot_int8_tiles({panels, panel_bytes, k, codes, x_blocks, tiles}, num_panels, out);
    }
    const PanelRows rows{panels, panel_bytes, k, reinterpret_cast<const bf16*>(x), tiles};
    format == Fp4Format::kMxfp4 ? expert_dot_tiles<Fp4Format::kMxfp4>(rows, num_panels, out)
                                : expert_dot_tiles<Fp4Format::kNvfp4>(rows, num_panels, out);
  }
#endif
};

// Calls tile(first, num) for tiles of at most max_rows() rows and nearly equal size: with a maximum of 12, 13
// rows become 7 + 6. Sums have the same order for every tile size, so the cut changes no bits.
template <class Tile>
void for_each_tile(const ExpertGemmArgs& g, const Tile& tile) {
  const int64_t rows = g.x.rows, num_tiles = (rows + max_rows(g) - 1) / max_rows(g);
  for (int64_t i = 0, first = 0; i < num_tiles; ++i) {
    const int64_t num = (rows - first + num_tiles - i - 1) / (num_tiles - i);
    tile(first, num);
    first += num;
  }
}

// The bound is the first operand, because min and max propagate a NaN in their second operand.
Vec activate(const Activation& act, Vec gate, Vec up) {
  switch (act.kind) {
    case ActivationKind::kSwigluOai: {
      const Vec g = min(broadcast(act.limit), gate);
      const Vec u = min(broadcast(act.limit), max(broadcast(-act.limit), up));
      return mul(times_sigmoid(g, mul(broadcast(act.alpha), g)), add(u, broadcast(act.beta)));
    }
    case ActivationKind::kSilu:
      return mul(times_sigmoid(gate, gate), up);
    case ActivationKind::kRelu2: {
      const Vec u = max(zero(), up);
      return mul(u, u);
    }
  }
  return zero();
}

// Applies scales and bias to the sums of one row and panel.
Vec scale_and_bias(const ExpertGemmArgs& g, const Lanes& sums, float scale, int64_t row, int64_t panel) {
  Vec y = mul(load(sums), broadcast(scale));
  if (g.x_row_scales != nullptr) y = mul(y, broadcast(g.x_row_scales[row]));
  return add(y, load(g.bias + panel * kPanelRows));
}

int64_t panel_bytes(Fp4Format format, int64_t k) { return expert_panel_bytes(format, k); }

void gate_up(const ExpertGateUpArgs& a) {
  const ExpertGemmArgs& g = a.gemm;
  const int64_t group = a.activation.kind == ActivationKind::kRelu2 ? 1 : 2;  // panels per 16 output columns
  for_each_tile(g, [&](int64_t first, int64_t num) {
    const TileDot tile(g, first, num);
    for (int64_t p = 0; p < g.num_panels; p += group) {
      const int64_t up_panel = p + group - 1;
      alignas(64) PanelSums sums[2];
      tile.multiply(g, p, group, sums);
      for (int64_t t = 0; t < num; ++t) {
        const Vec gate = group == 2 ? scale_and_bias(g, sums[0][t], a.gate_scale, first + t, p) : zero();
        const Vec up = scale_and_bias(g, sums[group - 1][t], a.up_scale, first + t, up_panel);
        const Vec y = activate(a.activation, gate, up);
        const int64_t out = (first + t) * g.out_stride + p / group * kPanelRows;
        if (a.out_dtype == DType::kF32)
          store(static_cast<float*>(a.out) + out, y);
        else
          store(static_cast<bf16*>(a.out) + out, y);
      }
    }
  });
}

void down(const ExpertDownArgs& a) {
  const ExpertGemmArgs& g = a.gemm;
  for_each_tile(g, [&](int64_t first, int64_t num) {
    const TileDot tile(g, first, num);
    for (int64_t panel = 0; panel < g.num_panels; panel += 2) {
      const int64_t num_panels = g.num_panels - panel < 2 ? 1 : 2;
      alignas(64) PanelSums sums[2];
      tile.multiply(g, panel, num_panels, sums);
      for (int64_t p = 0; p < num_panels; ++p)
        for (int64_t t = 0; t < num; ++t)
          store(a.out + (first + t) * g.out_stride + (panel + p) * kPanelRows,
                scale_and_bias(g, sums[p][t], a.scale, first + t, panel + p));
    }
  });
}

// Four partial sums (h mod 4) hide the latency of the additions.
void router_logits(const RouterLogitsArgs& a) {
  for (int64_t t = 0; t < a.num_tokens; ++t) {
    const float* x = a.x + t * a.hidden_size;
    Vec sums[4] = {zero(), zero(), zero(), zero()};
    const auto add_term = [&](int64_t h, Vec& to) {
      to = fma(load(a.panel + h * kPanelRows), broadcast(x[h]), to);
    };
    const int64_t whole = a.hidden_size / 4 * 4;
    for (int64_t h = 0; h < whole; h += 4)
      for (int64_t i = 0; i < 4; ++i) add_term(h + i, sums[i]);
    for (int64_t h = whole; h < a.hidden_size; ++h) add_term(h, sums[h - whole]);
    const Vec logits = add(add(sums[0], sums[1]), add(sums[2], sums[3]));
    store(a.out + t * a.out_stride, add(logits, load(a.bias)));
  }
}

}  // namespace

extern const ExpertOps kExpertOps;
const ExpertOps kExpertOps = {
    FP4MOE_STRING(FP4MOE_ISA), panel_bytes, pack_expert_panel, gate_up, down, router_logits};

}  // namespace fp4moe::FP4MOE_ISA
