// Packs FP4 matrices into tiles (tile_layout.h, fp8_tile_layout.h) on the GPU.
#pragma once

#include <cstdint>

#include "formats/fp4_matrix.h"

namespace fp4moe {

// A source matrix of a tile's rows. In a pair, side 0 is gate and side 1 is up; otherwise, all rows come from
// side 0. All pointers are device pointers; rows are contiguous, and codes are 16-byte aligned.
struct TilePackSide {
  const uint8_t* codes = nullptr;   // [rows, cols / 2]
  const uint8_t* scales = nullptr;  // [rows, cols / block]
  float* scale = nullptr;           // output: the tiles' factor * tensor_scale; FP8: tensor_scale
  float tensor_scale = 1;
  int32_t least = 255, most = 0;  // MXFP4: range of the nonzero groups' e8m0 bytes; set by the kernel
};

struct TilePackJob {
  TilePackSide side[2];  // side 1 is not used unless is_pair
  uint8_t* tiles = nullptr;
  int32_t rows = 0, cols = 0;  // of each side
  bool is_pair = false;
};

// `jobs` [num_jobs] is in device memory; all jobs have the same format, and the tiles of each have at most
// max_rows rows and max_cols columns. worst_span: a counter on the device, raised to the widest span of e8m0
// scales in any matrix (FP8: in any row) so far. The kernels are enqueued on the current stream.
struct TilePackArgs {
  Fp4Format format = Fp4Format::kMxfp4;
  TilePackJob* jobs = nullptr;
  int num_jobs = 0;
  int64_t max_rows = 0, max_cols = 0;
  int32_t* worst_span = nullptr;
};
void launch_tile_pack(const TilePackArgs& args);
void launch_fp8_tile_pack(const TilePackArgs& args);

}  // namespace fp4moe
