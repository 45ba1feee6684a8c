// The gated delta net of decode for many sequences: one row each, states streamed through shared memory.
#pragma once

#include "kernels/gated_delta.h"

namespace fp4moe::cuda {

// For arguments that gated_delta_row_fits(), with at least one sequence; made for so many that each SM has a
// key head. The bits are those of gated_delta_row().
void gated_delta_stream(const GatedDeltaArgs& args);

}  // namespace fp4moe::cuda
