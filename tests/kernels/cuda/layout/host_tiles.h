// Packs and reads tiles of FP4 matrices on the host: the reference for the kernels that pack and read tiles.
#pragma once

#include "kernels/cuda/layout/fp8_tile_layout.h"
#include "kernels/cuda/layout/tile_layout.h"

namespace fp4moe {

// Packs w into dst [tiled_bytes()]. Returns f: a weight is f * tensor_scale * its value in the tiles. Returns
// kUnsupported if the e8m0 scales of nonzero blocks of w span more than kMaxScaleSpan octaves.
Result<float> pack_tiles(const Fp4MatrixView& w, uint8_t* dst);
// Packs two matrices of equal shape [I, K], I % 32 == 0, interleaved as in tile_layout.h: [2 I, K]. Returns
// one f per matrix.
struct GateUpFactors {
  float gate = 1, up = 1;
};
Result<GateUpFactors> pack_gate_up_tiles(const Fp4MatrixView& gate, const Fp4MatrixView& up, uint8_t* dst);
// Returns element (r, c) as the kernels decode it: the code times 2^-126 times its scale as bf16.
float tiled_at(Fp4Format format, const uint8_t* tiles, int64_t n, int64_t k, int64_t r, int64_t c);

// w4a8: packs w into dst [fp8_tiled_bytes()]. Returns kUnsupported if the e8m0 scales of a row span more
// octaves than e4m3 can hold.
Status pack_fp8_tiles(const Fp4MatrixView& w, uint8_t* dst);
// Packs two matrices of equal shape [I, K], I % 32 == 0, interleaved as in tile_layout.h: [2 I, K].
Status pack_fp8_gate_up_tiles(const Fp4MatrixView& gate, const Fp4MatrixView& up, uint8_t* dst);
// Returns element (r, c) without the tensor scale, as the kernels decode it.
float fp8_tiled_at(Fp4Format format, const uint8_t* tiles, int64_t n, int64_t k, int64_t r, int64_t c);
// Returns the operand: the e4m3 byte of a magnitude (code & 7) with a scale index (MXFP4: byte / 8).
uint8_t fp8_operand(Fp4Format format, int scale_index, int magnitude);

}  // namespace fp4moe
