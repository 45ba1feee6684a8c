// The gated delta net of decode: one row per sequence.
#pragma once

#include "kernels/gated_delta.h"

namespace fp4moe::cuda {

// Whether sequences have one row each and no drafts, and heads and convolution the dims that the kernel
// knows.
bool gated_delta_row_fits(const GatedDeltaArgs& args);

// The bits are those of the recurrence for any number of rows.
void gated_delta_row(const GatedDeltaArgs& args);

}  // namespace fp4moe::cuda
