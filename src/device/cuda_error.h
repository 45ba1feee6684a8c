// Errors of the CUDA runtime as Status. For sources of builds with CUDA only.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "fp4moe/status.h"

namespace fp4moe {

// "what: out of memory": kDoesNotFit for memory, else kInternal.
inline Status cuda_failure(const std::string& what, cudaError_t error) {
  const std::string text = what + ": " + cudaGetErrorString(error);
  return error == cudaErrorMemoryAllocation ? does_not_fit(text) : internal_error(text);
}

}  // namespace fp4moe
