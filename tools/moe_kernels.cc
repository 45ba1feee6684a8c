#include "moe_kernels.h"

#include "kernels/cuda/fp8_tile_layout.h"
#include "kernels/cuda/tile_layout.h"
#include "kernels/device_moe_fp8.h"
#include "kernels/device_peak.h"

namespace fp4moe {
namespace {

void fill_tile_matrices(Fp4Format format, uint8_t* weights, int64_t n, int64_t k, int64_t num_matrices,
                        uint64_t seed) {
  sm90_peak_ops()->fill_tiles(format, weights, num_matrices * num_tiles(n) * num_tiles(k), seed);
}

void fill_fp8_matrices(Fp4Format format, uint8_t* weights, int64_t n, int64_t k, int64_t num_matrices,
                       uint64_t seed) {
  sm90_peak_ops()->fill_fp8_tiles({format, weights, n, k, num_matrices, seed});
}

}  // namespace

Result<MoeKernels> moe_kernels_of(const std::string& scheme) {
  const DeviceMoeOps* ops = sm90_moe_ops();
  if (ops == nullptr || sm90_peak_ops() == nullptr)
    return unsupported("this build has no MoE kernels for Hopper: configure with -DFP4MOE_CUDA=ON");
  if (scheme == "w4a16")
    return MoeKernels{.scheme = "w4a16",
                      .name = ops->name,
                      .matrix_bytes = tiled_bytes,
                      .fill = fill_tile_matrices,
                      .workspace_bytes = ops->layer_workspace_bytes,
                      .layer = ops->layer};
  if (scheme == "w4a8")
    return MoeKernels{.scheme = "w4a8",
                      .name = sm90_fp8_moe_ops()->name,
                      .matrix_bytes = fp8_tiled_bytes,
                      .fill = fill_fp8_matrices,
                      .workspace_bytes = sm90_fp8_moe_ops()->layer_workspace_bytes,
                      .layer = sm90_fp8_moe_ops()->layer};
  return unsupported("fp4-compute=" + scheme + ": bench moe measures w4a16 and w4a8");
}

}  // namespace fp4moe
