// Packs bf16 experts into the tiles of kernels/cuda/layout/tile_layout.h, on the host.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"
#include "io/checkpoint/expert_weights.h"

namespace fp4moe {

// A matrix of tiles: `rows`, or the rows of a gate and an up matrix of the same shape, which alternate as in
// the tiles.
struct Bf16TileRows {
  const Bf16MatrixView* gate = nullptr;  // null: only `rows`
  const Bf16MatrixView* rows = nullptr;  // with a gate: up
};

// Fills `tiles`, which is tiled_bytes() of Fp4Format::kNone long; rows and columns past the ends are zeros.
// With a gate, its number of rows is a multiple of 32.
void pack_bf16_tiles(const Bf16TileRows& matrix, uint8_t* tiles, ThreadPool& pool);

}  // namespace fp4moe
