// The router: gate GEMM, scoring, top-k, renormalisation and scaling. Always in f32 on unquantised rows.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "formats/bf16.h"

namespace fp4moe {

// How logits become weights.
enum class RouterScoring : uint8_t {
  kTopkSoftmax,   // top-k of the logits, softmax over these k (gpt-oss); ties go to the lower expert id
};

struct RouterWeights {
  RouterScoring scoring = RouterScoring::kTopkSoftmax;
  const bf16* weight = nullptr;  // [E, H] row-major
  std::vector<float> bias;       // [E] or empty
};

}  // namespace fp4moe
