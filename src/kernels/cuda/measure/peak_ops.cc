#include "kernels/cuda/measure/peak.h"
#include "kernels/device_peak.h"

namespace fp4moe {

const DevicePeakOps* sm90_peak_ops() {
  static constexpr DevicePeakOps kOps = {.read = peak_read,
                                         .empty = peak_empty,
                                         .matmul = peak_matmul,
                                         .fill_random = fill_random,
                                         .fill_normal = fill_normal,
                                         .fill_tiles = fill_tiles,
                                         .fill_fp8_tiles = fill_fp8_tiles};
  return &kOps;
}

}  // namespace fp4moe
