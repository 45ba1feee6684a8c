// Dense linear layers for many tokens, and for shapes that linear_few does not support.
#pragma once

#include "kernels/ops.h"

namespace fp4moe {

// Opens cuBLASLt and creates its handle and its workspace for the current GPU; later calls on this GPU return
// the first call's status.
Status prepare_linear_lt();

// kBest: the best algorithm for each number of tokens. kOneForAll: one algorithm for any number of tokens, so
// that a token has the same bits in every batch.
enum class LtAlgorithm : uint8_t { kBest, kOneForAll };

// DenseOps::linear. Errors are kept by the current stream. Each stream has its own workspace, so products on
// several streams of a GPU may overlap.
void linear_lt(const LinearArgs& args, LtAlgorithm algorithm);

}  // namespace fp4moe
