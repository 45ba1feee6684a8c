// The kernels that `bench moe` times, one row a scheme: how weights lie in memory, random ones, a whole
// layer.
#pragma once

#include <cstdint>
#include <string>

#include "fp4moe/status.h"
#include "kernels/device_moe.h"

namespace fp4moe {

struct MoeKernels {
  const char* scheme;
  const char* name;
  // Of one expert's matrix [n, k].
  int64_t (*matrix_bytes)(Fp4Format format, int64_t n, int64_t k);
  // num_matrices of them with random codes and scales, on the current stream.
  void (*fill)(Fp4Format format, uint8_t* weights, int64_t n, int64_t k, int64_t num_matrices, uint64_t seed);
  DeviceMoeTactic tactic;
};

// `tactic`: one of the scheme's, or "auto". kUnsupported in a build without CUDA.
Result<MoeKernels> moe_kernels_of(const std::string& scheme, const std::string& tactic);

}  // namespace fp4moe
