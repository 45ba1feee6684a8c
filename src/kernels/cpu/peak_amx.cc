// Dot products of AMX tiles, for `fp4moe bench peak`. Compiled with AMX's flags and no other ISA's.
//
// Computes: results are discarded.
// Bytes:    none.
// Flops:    per round, 6 products of tiles with 16 rows of 64 bytes; each computes 16 x 16 sums over 32 bf16
//           or 64 int8 products.
// Bound:    the tile multiplier: a product occupies it for 16 cycles and has a latency of about 52, so four
//           independent sums keep it busy.
// Numerics: sums of ones.
#include <stdint.h>

#include "kernels/cpu_peak.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include "kernels/cpu/tiles_amx.h"

namespace fp4moe::cpu_amx {
namespace {

constexpr int kSums = 6, kRowBytes = 64;

// Runs products() `rounds` times. Tiles 0 to 5 hold sums; 6 and 7 hold operands filled with `pair`.
template <class Products>
void run_tiles(int64_t rounds, uint16_t pair, const Products& products) {
  alignas(64) uint16_t operand[kTileRows * kRowBytes / 2];
  for (uint16_t& element : operand) element = pair;
  tile_memory_written(operand);
  configure_tiles(kTileRows, kRowBytes);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_loadd(6, operand, kRowBytes);
  _tile_loadd(7, operand, kRowBytes);
  for (int64_t r = 0; r < rounds; ++r) products();
  _tile_release();
}

void bf16_dots(int64_t rounds) {
  run_tiles(rounds, 0x3f80, [] {
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(1, 6, 7);
    _tile_dpbf16ps(2, 6, 7);
    _tile_dpbf16ps(3, 6, 7);
    _tile_dpbf16ps(4, 6, 7);
    _tile_dpbf16ps(5, 6, 7);
  });
}

void int8_dots(int64_t rounds) {
  run_tiles(rounds, 0x0101, [] {
    _tile_dpbssd(0, 6, 7);
    _tile_dpbssd(1, 6, 7);
    _tile_dpbssd(2, 6, 7);
    _tile_dpbssd(3, 6, 7);
    _tile_dpbssd(4, 6, 7);
    _tile_dpbssd(5, 6, 7);
  });
}

constexpr int64_t kSumFlops = 2 * kTileRows * (kRowBytes / 4) * kSums;
constexpr CpuPeakOps kOps = {.name = "cpu_amx",
                             .f32 = {},
                             .bf16 = {"tdpbf16ps", kSumFlops * 32, bf16_dots},
                             .int8 = {"tdpbssd", kSumFlops * 64, int8_dots}};

}  // namespace
}  // namespace fp4moe::cpu_amx

namespace fp4moe {
const CpuPeakOps* amx_peak_ops() { return isa_available(Isa::kAmx) ? &cpu_amx::kOps : nullptr; }
}  // namespace fp4moe
#else
namespace fp4moe {
const CpuPeakOps* amx_peak_ops() { return nullptr; }
}  // namespace fp4moe
#endif
