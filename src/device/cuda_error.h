// CUDA runtime errors as Status. Only for sources that are compiled with CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "fp4moe/status.h"

namespace fp4moe {

// Returns "what: <CUDA's error string>"; kDoesNotFit if out of memory, otherwise kInternal.
inline Status cuda_failure(const std::string& what, cudaError_t error) {
  const std::string text = what + ": " + cudaGetErrorString(error);
  return error == cudaErrorMemoryAllocation ? does_not_fit(text) : internal_error(text);
}

}  // namespace fp4moe
