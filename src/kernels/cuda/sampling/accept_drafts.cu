// Acceptance of drafts after sampling, and the rows that depend on it. One thread per row.
//
// Computes:  as documented in kernels/device_drafts.h.
// Shapes:    T rows: one for each sequence, and one for each of its drafts.
// Bytes:     accept_drafts: 8 of each row's sample, 12 of its batch, 24 written, 8 of them over PCIe;
//            move_rows: at most 60 per row; move_randoms: 20 per row. All are a few kilobytes.
// Flops:     a comparison per draft.
// Bound:     the launch, and the chain of loads of a sequence's drafts.
// Numerics:  exact; a random number has the bits of the host's.
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/device_drafts.h"
#include "kernels/token_random.h"

namespace fp4moe {
namespace {

constexpr int kThreads = 64;

// No id, or the id of the token that the row has sampled.
__device__ __forceinline__ int32_t token_of(const SampledRow& row) {
  const auto status = static_cast<SampleStatus>(__ldcg(reinterpret_cast<const int32_t*>(&row.status)));
  return status == SampleStatus::kOk ? __ldcg(&row.token_id) : -1;
}

__global__ void __launch_bounds__(kThreads) accept_drafts_kernel(const __grid_constant__ AcceptDraftsArgs a) {
  ptx::grid_dependency_wait();
  const int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (row >= a.num_rows) return;
  const int32_t most = __ldcg(a.num_drafts + row);
  int32_t num_drafts = 0, num_right = 0;
  for (; num_drafts < most; ++num_drafts) {
    int32_t draft = __ldcg(a.token_ids + row + num_drafts + 1);
    if (draft < 0) draft = token_of(a.sampled[~draft]);
    if (draft < 0) break;
    if (num_right == num_drafts && token_of(a.sampled[row + num_drafts]) == draft) ++num_right;
  }
  a.distances[row] = __ldcg(a.moves + row);
  a.distances[a.right + row] = num_right;
  a.sampled[row].num_right = num_right;
  a.sampled[row].num_drafts = num_drafts;
  if (a.copy == nullptr) return;
  a.copy[row].num_right = num_right;
  a.copy[row].num_drafts = num_drafts;
}

// Dependents may start only after it, because a step's kernels read the batch without a wait.
__global__ void __launch_bounds__(kThreads) move_rows_kernel(const __grid_constant__ MoveRowsArgs a) {
  ptx::grid_dependency_wait();
  const int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (row >= a.num_rows) return;
  const int32_t move = __ldcg(a.moves + row);
  if (move == 0) return;
  const int32_t distance = __ldcg(a.distances + move / 2 - 1);
  a.positions[row] = __ldcg(a.positions + row) + distance;
  a.first_position[row] = __ldcg(a.first_position + row) + distance;
  if (move % 2 == 1) {
    a.token_ids[row] = __ldcg(a.token_ids + row) - distance;  // ~(r + distance)
    if (a.feature_rows != nullptr) a.feature_rows[row] = __ldcg(a.feature_rows + row) + distance;
  }
  a.moves[row] = distance;
}

__global__ void __launch_bounds__(kThreads) move_randoms_kernel(const __grid_constant__ MoveRandomsArgs a) {
  ptx::grid_dependency_wait();
  const int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (row >= a.num_rows) return;
  const int32_t distance = __ldcg(a.moves + row);
  if (distance != 0) a.params[row].random = random_number(a.params[row].random_state, distance);
}

LaunchShape shape_of_rows(int64_t num_rows) {
  return {dim3(static_cast<unsigned>(ceil_div(num_rows, kThreads))), dim3(kThreads)};
}

}  // namespace

AcceptDrafts cuda_accept_drafts() {
  return [](const AcceptDraftsArgs& args) {
    launch("accept_drafts", accept_drafts_kernel, shape_of_rows(args.num_rows), args);
  };
}

MoveRows cuda_move_rows() {
  return [](const MoveRowsArgs& args) {
    launch("move_rows", move_rows_kernel, shape_of_rows(args.num_rows), args);
  };
}

MoveRandoms cuda_move_randoms() {
  return [](const MoveRandomsArgs& args) {
    launch("move_randoms", move_randoms_kernel, shape_of_rows(args.num_rows), args);
  };
}

}  // namespace fp4moe
