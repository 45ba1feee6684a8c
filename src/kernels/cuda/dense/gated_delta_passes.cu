// gated_delta in chunks: the launches of all passes, and the workspace.
//
// The chain of the second kernel leaves half of the SMs idle for a sequence of 32 value heads, so other
// passes run beside it. With M, S and O for the kernels of a pass, the order on the stream is
//   M1 S1 M2 S2 M3 O1 S3 M4 O2 S4 O3 O4        (one pass: M1 S1 O1; two: M1 S1 M2 S2 O1 O2)
// M1, each S and the last O wait for the kernel before to be complete. S lets the next kernel start only
// after that wait, so the M and O between two S need no wait for S(i - 1) and all before it, and do not wait
// for S(i). Only the last block of each waits for the kernel before, once it is done: a complete M or O means
// that all kernels before it are complete, too.
//   M(i + 1), beside S(i), writes keys and matrices over those of pass i - 1, read by S(i - 1), and values
//   over those of pass i - 2, read by O(i - 2), which S(i) waited for.
//   It reads conv inputs of the slots of sequences with chunks in its pass; S stores those of sequences whose
//   last chunk is in its pass, and earlier passes have other sequences' last chunks.
//   O(i - 1), beside S(i), reads the values that S(i - 1) wrote.
#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/dense/gated_delta_chunks.cuh"
#include "kernels/cuda/dense_kernels.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/ref/dense_ref.h"

namespace fp4moe::cuda {
namespace {

// Passes whose data are in the workspace at once. kKeyBuffers: also of matrices.
constexpr int64_t kKeyBuffers = 2, kValueBuffers = 3;

// The most chunks of rows of num_sequences sequences.
int64_t most_chunks(int64_t rows, int64_t num_sequences) {
  return (rows + num_sequences * 2 * (kDeltaChunk - 1)) / kDeltaChunk;
}

// The passes [first(i), first(i + 1)) of the chunks, of nearly the same size. If the longest sequence has
// more than kMaxSinglePass chunks, a second pass hides more of the first and third kernel than another start
// of the chain costs; several sequences' chains leave fewer SMs idle. Otherwise there are only as many passes
// as the workspace requires: in a small pass, the blocks of the first kernel fill the SMs unevenly.
struct ChunkPasses {
  int64_t chunks, count;
  ChunkPasses(int64_t of, int64_t longest)
      : chunks(of),
        count(std::max<int64_t>(longest > kMaxSinglePass ? 2 : 1, ceil_div(of, kMaxPassChunks))) {}
  int64_t first(int64_t pass) const { return chunks * pass / count; }
  int64_t most() const { return ceil_div(chunks, count); }
  int64_t key_buffers() const { return std::min<int64_t>(count, kKeyBuffers); }
};

ChunkParams pass_params(const GatedDeltaArgs& args, const ChunkPasses& passes, int64_t pass,
                        bool runs_beside) {
  const int64_t most = passes.most(), key_buffer = pass % kKeyBuffers, value_buffer = pass % kValueBuffers;
  ChunkParams p;
  p.args = args;
  p.sequences = args.device_batch->states;
  p.first_chunk = static_cast<int>(passes.first(pass));
  p.num_chunks = static_cast<int>(passes.first(pass + 1)) - p.first_chunk;
  p.runs_beside = runs_beside;
  const auto keys = reinterpret_cast<DeltaKeys*>(args.workspace);
  const auto matrices =
      reinterpret_cast<DeltaMatrices*>(keys + passes.key_buffers() * most * args.num_key_heads);
  const auto values =
      reinterpret_cast<DeltaValues*>(matrices + passes.key_buffers() * most * args.num_value_heads);
  p.keys = keys + key_buffer * most * args.num_key_heads;
  p.matrices = matrices + key_buffer * most * args.num_value_heads;
  p.values = values + value_buffer * most * args.num_value_heads;
  return p;
}

bool chunks_fit(const GatedDeltaArgs& args) {
  return args.key_head_dim == kDeltaDim && args.value_head_dim == kDeltaDim;
}

}  // namespace

void gated_delta_chunks(const GatedDeltaArgs& args) {
  FP4MOE_CHECK(args.workspace != nullptr, "no workspace");
  const DeviceBatch& batch = *args.device_batch;
  const DeviceStates& states = batch.states;
  // The longest sequence, and as many of the shortest that run in chunks as the other rows can be.
  const int64_t num_sequences = std::min(
      states.num_sequences, 1 + std::max<int64_t>(0, batch.num_rows - states.max_rows) / kMinChunkedRows);
  const ChunkPasses passes(most_chunks(batch.num_rows, num_sequences), most_chunks(states.max_rows, 1));
  const auto params = [&](int64_t pass, bool runs_beside = false) {
    return pass_params(args, passes, pass, runs_beside);
  };
  launch_chunk_matrices(params(0));
  for (int64_t pass = 0; pass < passes.count; ++pass) {
    launch_chunk_states(params(pass), static_cast<int>(num_sequences));
    if (pass + 1 < passes.count) launch_chunk_matrices(params(pass + 1, true));
    if (pass > 0) launch_chunk_outputs(params(pass - 1, true));
  }
  launch_chunk_outputs(params(passes.count - 1));
}

int64_t gated_delta_workspace_bytes(const GatedDeltaArgs& args, int64_t max_tokens) {
  if (!chunks_fit(args) || max_tokens < kMinChunkedRows) return 0;
  const int64_t chunks = most_chunks(max_tokens, max_tokens / kMinChunkedRows);
  // At least what any smaller number of chunks needs: passes of the same size may have a chunk more in all.
  const int64_t of_keys = std::min<int64_t>(chunks + kKeyBuffers - 1, kKeyBuffers * kMaxPassChunks),
                of_values = std::min<int64_t>(chunks + kValueBuffers - 1, kValueBuffers * kMaxPassChunks);
  return of_keys * (args.num_key_heads * int64_t{sizeof(DeltaKeys)} +
                    args.num_value_heads * int64_t{sizeof(DeltaMatrices)}) +
         of_values * args.num_value_heads * int64_t{sizeof(DeltaValues)};
}

void gated_delta_by_length(const GatedDeltaArgs& args, ThreadPool& pool) {
  const DeviceBatch& batch = *args.device_batch;
  const int64_t max_rows = batch.states.max_rows;
  if (!chunks_fit(args) || max_rows < kMinChunkedRows) return gated_delta(args, pool);
  if (batch.num_rows > max_rows || args.slots.num_replay_rows > 0)
    gated_delta_rows(args, kMinChunkedRows - 1);
  ref::check_gated_delta(args);
  gated_delta_chunks(args);
}

}  // namespace fp4moe::cuda
