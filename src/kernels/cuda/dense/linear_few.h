// Dense linear layers for few tokens, bound by reading the weights.
#pragma once

#include "kernels/ops.h"

namespace fp4moe {

// Up to this many tokens, a step's kernels are bound by latency, and normalising the tokens in every block
// costs less than a separate launch.
constexpr int64_t kFewLoneTokens = 4;

// Returns whether linear_few supports the op: T <= 16, K is a multiple of 32, and x and a ring of weights fit
// in shared memory.
bool linear_few_fits(const LinearArgs& args);

// DenseOps::linear. Precondition: linear_few_fits.
void linear_few(const LinearArgs& args);
// DenseOps::norm_linear with the norm inside; linear.x.data and norm.out_act.data are not written. Two layers
// are one launch if the second (also) has bf16 weights and is not larger, otherwise two. Precondition:
// linear_few_fits for both layers; T <= kFewLoneTokens; norm.out_f32 is null.
void norm_linear_few(const NormLinearArgs& args);

}  // namespace fp4moe
