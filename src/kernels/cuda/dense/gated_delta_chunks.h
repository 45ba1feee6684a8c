// The gated delta net of many rows in chunks, with matrix products instead of one row after another.
#pragma once

#include "kernels/gated_delta.h"

namespace fp4moe::cuda {

constexpr int kDeltaChunk = 64, kDeltaDim = 128;  // rows; dk and dv of the heads that run in chunks

// Sequences with fewer new rows, with replayed rows or with drafts run by the recurrence.
constexpr int kMinChunkedRows = 32;

// Chunks per pass, which limit the workspace: with 16 key heads the first kernel's blocks then fill 132 SMs,
// two blocks each, twice.
constexpr int kMaxPassChunks = 33;

// A sequence with more chunks has at least two passes.
constexpr int kMaxSinglePass = 24;

struct ChunkParams;

// Runs every sequence that the recurrence does not run; others are left alone.
void gated_delta_chunks(const GatedDeltaArgs& args);

// The kernels of a pass. The first writes the data between them, the second the slots of up to num_sequences
// sequences and the outputs before norm and gate, the third the outputs. All other passes' kernels that a
// kernel depends on must be complete once the chunk_states launched last runs; see gated_delta_chunks.cu.
void launch_chunk_matrices(const ChunkParams& params);
void launch_chunk_states(const ChunkParams& params, int num_sequences);
void launch_chunk_outputs(const ChunkParams& params);

}  // namespace fp4moe::cuda
