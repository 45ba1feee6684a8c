// FP4 matrices in tiles, packed and read on the host: the reference for the kernels that pack and read them.
#pragma once

#include "kernels/cuda/layout/fp8_tile_layout.h"
#include "kernels/cuda/layout/tile_layout.h"

namespace fp4moe {

// w -> dst, tiled_bytes() long. Returns f: a weight is f * tensor_scale * what the tiles hold. kUnsupported
// if e8m0 scales of w (of nonzero blocks) span more than kMaxScaleSpan octaves.
Result<float> pack_tiles(const Fp4MatrixView& w, uint8_t* dst);
// Two matrices of equal shape [I, K], I % 32 == 0, interleaved as in tile_layout.h: [2 I, K]. One f for each.
struct GateUpFactors {
  float gate = 1, up = 1;
};
Result<GateUpFactors> pack_gate_up_tiles(const Fp4MatrixView& gate, const Fp4MatrixView& up, uint8_t* dst);
// Element (r, c) as the kernels make it: the code times 2^-126 times its scale's bf16.
float tiled_at(Fp4Format format, const uint8_t* tiles, int64_t n, int64_t k, int64_t r, int64_t c);

// w4a8: w -> dst, fp8_tiled_bytes() long. kUnsupported if e8m0 scales in one row span more than e4m3 holds.
Status pack_fp8_tiles(const Fp4MatrixView& w, uint8_t* dst);
// Two matrices of equal shape [I, K], I % 32 == 0, interleaved as in tile_layout.h: [2 I, K].
Status pack_fp8_gate_up_tiles(const Fp4MatrixView& gate, const Fp4MatrixView& up, uint8_t* dst);
// Element (r, c) without the tensor scale, as the kernels make it.
float fp8_tiled_at(Fp4Format format, const uint8_t* tiles, int64_t n, int64_t k, int64_t r, int64_t c);
// The operand: e4m3 byte of a magnitude (code & 7) under a scale index (MXFP4: byte / 8).
uint8_t fp8_operand(Fp4Format format, int scale_index, int magnitude);

}  // namespace fp4moe
