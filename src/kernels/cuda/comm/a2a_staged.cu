// The results of an exchange between ranks that do not share memory (kernels/group_plane.h).
//
// Computes:  return: stores the lanes' results for each other rank in its staging area. add: out [t] += the
//            results of token t, which have arrived in staging areas by source. decode: the lanes' rows in
//            bf16.
// Shapes:    H a multiple of 8, K up to 32; any T, any number of ranks up to kMaxGroupRanks.
// Bytes:     as combine in a2a.cu, in local memory. Between the kernels, each pair of ranks exchanges room
//            for one result, or K, for every token, whether or not it is used.
// Flops:     K fma per element of a token.
// Bound:     the exchange.
// Numerics:  the bits of a2a.cu.
#include "kernels/cuda/comm/a2a_results.cuh"
#include "kernels/cuda/comm/comm_kernels.h"
#include "kernels/staged_transfers.h"

namespace fp4moe::cuda {
namespace {

// SharedPlaces for staging areas: one for each rank, with room for one result of a token, or for all its
// slots.
struct StagedPlaces {
  static constexpr bool kIsStaged = true;
  template <class T>
  static __device__ __forceinline__ T* outgoing(const A2aRound& a, int rank, int64_t token, int part) {
    return place<T>(a, a.area.outgoing, rank, token, part);
  }
  template <class T>
  static __device__ __forceinline__ T* incoming(const A2aRound& a, int source, int64_t token, int part) {
    return place<T>(a, a.area.returns, source, token, part);
  }
  template <class T>
  static __device__ __forceinline__ T* place(const A2aRound& a, int64_t area, int rank, int64_t token,
                                             int part) {
    const int64_t index =
        (rank * a.num_tokens + token) * a.shape.parts_of_rank() + (a.shape.slots_return ? part : 0);
    return exchange_memory<T>(a.group, a.group.rank, area) + index * a.shape.hidden_size;
  }
};

template <A2aRowFormat kFormat>
__global__ void __launch_bounds__(kThreads) decode_kernel(const __grid_constant__ A2aArgs args) {
  const A2aRound& a = args.round;
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  for (int source = 0; source < a.group.size; ++source)
    for_parts(args.work, [&](Part part) {
      part.row += source * static_cast<int>(a.num_tokens);
      decode_row<kFormat>(a, part, args.decoded);
    });
}

template <class T, class Y>
__global__ void __launch_bounds__(kThreads, 2) return_kernel(const __grid_constant__ A2aArgs args) {
  const A2aRound& a = args.round;
  __shared__ Lanes lanes;
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  for_parts(args.work, [&](const Part& part) {
    const LaneSlot first = load_slot(a, args.results, part.row, static_cast<int>(threadIdx.x) / 32);
    load_lanes(a, args.results, part.row, first, lanes);
    return_results<StagedPlaces, T, Y>(a, args.results, part, lanes);
  });
}

template <class T, class Y>
__global__ void __launch_bounds__(kThreads, 2) add_kernel(const __grid_constant__ A2aArgs args) {
  const A2aRound& a = args.round;
  __shared__ OwnToken own;
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  for_parts(args.work, [&](const Part& part) {
    if (!is_filled(a, part.row)) return;
    load_own_token<StagedPlaces>(a, args.results, part.row, own);
    add_results<StagedPlaces, T, Y>(a, args.results, part, own, args.out);
  });
}

}  // namespace

void staged_send(const A2aRound& a) { a.group.plane->exchange(a.op, row_transfers(a)); }

void staged_wait(const A2aRound& a, const A2aDecoded& decoded) {
  const Work work = send_work(a);
  const A2aArgs args{.round = a, .work = work, .decoded = decoded};
  switch (a.shape.row_format) {
    case A2aRowFormat::kBf16:
      return;  // the rows are in the lanes
    case A2aRowFormat::kFp8:
      return launch("a2a_decode_fp8", decode_kernel<A2aRowFormat::kFp8>, shape_of(work), args);
    case A2aRowFormat::kNvfp4:
      return launch("a2a_decode_nvfp4", decode_kernel<A2aRowFormat::kNvfp4>, shape_of(work), args);
  }
}

void staged_combine(const A2aRound& a, const A2aResults& results, float* out) {
  const Work work = combine_work(a);
  const A2aArgs args{.round = a, .work = work, .results = results, .out = out};
  with_result_type(a.shape, [&](auto type) {
    using T = decltype(type);
    const bool is_f32 = results.y != nullptr;
    launch("a2a_return", is_f32 ? return_kernel<T, float> : return_kernel<T, bf16>, shape_of(work), args);
    a.group.plane->exchange(a.op, result_transfers(a));
    launch("a2a_add", is_f32 ? add_kernel<T, float> : add_kernel<T, bf16>, shape_of(work), args);
  });
}

}  // namespace fp4moe::cuda
