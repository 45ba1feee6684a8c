// Sampling of greedy rows without log-probabilities.
#pragma once

#include "kernels/device_sampler.h"

namespace fp4moe {

// Samples rows that are all_greedy, as SampleRows specifies.
void sample_greedy(const SampleRowsArgs& args);

}  // namespace fp4moe
