// The launchers of DevicePeakOps, which are documented in kernels/device_peak.h.
#pragma once

#include "kernels/device_peak.h"

namespace fp4moe {

void peak_read(const uint8_t* data, int64_t num_bytes);
void peak_empty();
Status peak_matmul(const bf16* a, const bf16* b, bf16* out, int64_t n, uint8_t* workspace);
void fill_random(uint64_t* dst, int64_t n, uint64_t seed);
void fill_normal(bf16* dst, int64_t n, uint64_t seed);
void fill_tiles(Fp4Format format, uint8_t* tiles, int64_t num_tiles, uint64_t seed);
void fill_fp8_tiles(const Fp8FillArgs& args);

}  // namespace fp4moe
