// Dense linears of many tokens, and of shapes that linear_few does not take.
#pragma once

#include "kernels/ops.h"

namespace fp4moe {

// Opens cuBLASLt, makes its handle and its workspace; later calls return what the first did.
Status prepare_linear_lt();

// kBest: of each number of tokens. kOneForAll: one for any number, which gives a token the same bits.
enum class LtAlgorithm : uint8_t { kBest, kOneForAll };

// DenseOps::linear. What fails is kept by the current stream. Calls of several streams must not overlap: they
// share the workspace.
void linear_lt(const LinearArgs& args, LtAlgorithm algorithm);

}  // namespace fp4moe
