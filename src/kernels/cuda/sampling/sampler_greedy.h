// Greedy rows without log-probabilities.
#pragma once

#include "kernels/device_sampler.h"

namespace fp4moe {

// SampleRows of rows that are all_greedy.
void sample_greedy(const SampleRowsArgs& args);

}  // namespace fp4moe
