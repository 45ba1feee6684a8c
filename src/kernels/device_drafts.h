// Acceptance of drafts on a GPU: how many drafts of each sequence are the tokens that were sampled, and the
// batches whose rows depend on that number.
//
//   step      | token | draft 1 | draft 2 | draft 3 |    the rows of one sequence; row r has the token
//   sampled   |  y0   |   y1    |   y2    |   y3    |    y0 = draft 1, y1 = draft 2, y2 != draft 3: 2 right
//   next step                             |   y2    |    its first row is 2 positions after that of y0
#pragma once

#include <cstdint>

#include "kernels/device_sampler.h"

namespace fp4moe {

// A step in which every row has logits. Sets, for each row that num_drafts drafts of its sequence follow:
// SampledRow::num_drafts, the number of leading drafts that have an id, and num_right, the number of those
// that equal the tokens sampled before them. A draft after a row without a token is not right. Rows of drafts
// are computed like rows that no draft follows.
struct AcceptDraftsArgs {
  // [num_rows] the step's, then the rows that negative token ids refer to (ChosenTokens)
  SampledRow* sampled = nullptr;
  SampledRow* copy = nullptr;           // [num_rows]: the numbers are written here too; or null
  const int32_t* token_ids = nullptr;   // [num_rows]: a draft ~r is the id of sampled[r], if that has one
  const int32_t* num_drafts = nullptr;  // [num_rows]: 0 for rows of drafts; the drafts are the next rows
  const int32_t* moves = nullptr;       // [num_rows]: what move_rows has left, or 0
  int64_t num_rows = 0;
  // Out, for move_rows: [0, num_rows) the distance by which each row was moved, from `right` on num_right.
  int32_t* distances = nullptr;
  int64_t right = 0;  // at least num_rows
};

// Moves rows of a batch that was planned as if no draft were right. A decode batch: row t is sequence t.
struct MoveRowsArgs {
  const int32_t* distances = nullptr;
  // [num_rows] in: 0 (the row stays) or move_code(); out: the distance
  int32_t* moves = nullptr;
  int32_t* token_ids = nullptr;       // [num_rows]
  int64_t* positions = nullptr;       // [num_rows]
  int32_t* first_position = nullptr;  // [num_rows]
  int64_t* feature_rows = nullptr;    // [num_rows] or null
  int64_t num_rows = 0;
};

// Sets SampleRowParams::random of the rows of a batch that moved, whose host has assumed that they stay.
struct MoveRandomsArgs {
  SampleRowParams* params = nullptr;  // [num_rows]
  const int32_t* moves = nullptr;     // [num_rows]: what move_rows has left
  int64_t num_rows = 0;
};

// A row moves by distances[index]. If moves_ids, its token id ~r becomes ~(r + distance), and its feature row
// moves by the distance too.
constexpr int32_t move_code(int64_t index, bool moves_ids) {
  return static_cast<int32_t>(2 * (index + 1) + (moves_ids ? 1 : 0));
}

// Each is one launch on the current stream; all pointers but `copy` are device memory.
using AcceptDrafts = void (*)(const AcceptDraftsArgs&);
using MoveRows = void (*)(const MoveRowsArgs&);
using MoveRandoms = void (*)(const MoveRandomsArgs&);
// All return null in a build without CUDA.
AcceptDrafts cuda_accept_drafts();
MoveRows cuda_move_rows();
MoveRandoms cuda_move_randoms();

}  // namespace fp4moe
