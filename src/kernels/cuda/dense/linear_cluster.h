// Dense linear layers of bf16 for the batches of decode: more tokens than linear_few takes, up to 128.
#pragma once

#include "kernels/ops.h"

namespace fp4moe {

// Returns whether linear_cluster() supports the layer and is expected to be faster than linear_lt().
bool linear_cluster_fits(const LinearArgs& args);

// DenseOps::linear. args fit.
void linear_cluster(const LinearArgs& args);

}  // namespace fp4moe
