// Acceptance of drafts, row by row.
#include <vector>

#include "kernels/ref/drafts_ref.h"
#include "kernels/token_random.h"

namespace fp4moe::ref {
namespace {

// The ids of the drafts after a row, up to the first without one.
std::vector<int32_t> drafts_after(const AcceptDraftsArgs& a, int64_t row) {
  std::vector<int32_t> ids;
  for (int64_t next = row + 1; next <= row + a.num_drafts[row]; ++next) {
    const int32_t id = a.token_ids[next];
    if (id < 0 && a.sampled[~id].status != SampleStatus::kOk) break;
    ids.push_back(id < 0 ? a.sampled[~id].token_id : id);
  }
  return ids;
}

}  // namespace

void accept_drafts(const AcceptDraftsArgs& a) {
  for (int64_t row = 0; row < a.num_rows; ++row) {
    const std::vector<int32_t> drafts = drafts_after(a, row);
    int32_t num_right = 0;
    for (const int32_t draft : drafts) {
      const SampledRow& before = a.sampled[row + num_right];
      if (before.status != SampleStatus::kOk || before.token_id != draft) break;
      ++num_right;
    }
    a.distances[row] = a.moves[row];
    a.distances[a.right + row] = num_right;
    for (SampledRow* out : {a.sampled, a.copy}) {
      if (out == nullptr) continue;
      out[row].num_right = num_right;
      out[row].num_drafts = static_cast<int32_t>(drafts.size());
    }
  }
}

void move_rows(const MoveRowsArgs& a) {
  for (int64_t row = 0; row < a.num_rows; ++row) {
    if (a.moves[row] == 0) continue;
    const int32_t distance = a.distances[a.moves[row] / 2 - 1];
    a.positions[row] += distance;
    a.first_position[row] += distance;
    if (a.moves[row] % 2 == 1) {
      a.token_ids[row] = ~(~a.token_ids[row] + distance);
      if (a.feature_rows != nullptr) a.feature_rows[row] += distance;
    }
    a.moves[row] = distance;
  }
}

void move_randoms(const MoveRandomsArgs& a) {
  for (int64_t row = 0; row < a.num_rows; ++row)
    if (a.moves[row] != 0) a.params[row].random = random_number(a.params[row].random_state, a.moves[row]);
}

}  // namespace fp4moe::ref
