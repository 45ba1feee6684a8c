// Dense linear layers with an FP4 matrix in tiles, for few tokens, bound by reading the weights.
#pragma once

#include "kernels/device_moe.h"

namespace fp4moe {

// DeviceMoeOps::linear and DeviceMoeOps::linear_fits, for tiles of tile_layout.h.
bool linear_few_tiles_fits(const TiledLinearArgs& args);
void linear_few_tiles(const TiledLinearArgs& args);

}  // namespace fp4moe
