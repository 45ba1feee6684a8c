// Dense linears of many tokens, and of shapes that linear_few does not support.
#pragma once

#include "kernels/ops.h"

namespace fp4moe {

// Opens cuBLASLt, creates its handle and its workspace for the current GPU; later calls on this GPU return
// the first call's status.
Status prepare_linear_lt();

// kBest: the best for each number of tokens. kOneForAll: one for any number, so that a token has the same
// bits.
enum class LtAlgorithm : uint8_t { kBest, kOneForAll };

// DenseOps::linear. Errors are kept by the current stream. Calls of several streams of a GPU must not
// overlap: they share the workspace.
void linear_lt(const LinearArgs& args, LtAlgorithm algorithm);

}  // namespace fp4moe
