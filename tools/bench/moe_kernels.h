// The kernels that `bench moe` times for each scheme, with the size of the weights and a function that fills
// them with random values.
#pragma once

#include <cstdint>
#include <string>

#include "fp4moe/status.h"
#include "kernels/device_moe.h"

namespace fp4moe {

struct MoeKernels {
  const char* scheme;
  const char* name;
  // Bytes of one expert's matrix [n, k].
  int64_t (*matrix_bytes)(Fp4Format format, int64_t n, int64_t k);
  // Fills num_matrices matrices with random codes and scales, on the current stream.
  void (*fill)(Fp4Format format, uint8_t* weights, int64_t n, int64_t k, int64_t num_matrices, uint64_t seed);
  DeviceMoeTactic tactic;
};

// `tactic`: one of the scheme's tactics, or "auto". kUnsupported: the build has no CUDA kernels.
Result<MoeKernels> moe_kernels_of(const std::string& scheme, const std::string& tactic);

}  // namespace fp4moe
