// gated_delta_row: a step of decode, one row per sequence; of many sequences, by gated_delta_stream.cu. A
// block takes few registers, so that it starts beside those of the linear layers before and after it, and its
// loads are in flight meanwhile.
//
// Computes:  as documented in kernels/gated_delta.h, for one row. kSplits blocks share a value head, each
//            with kColumns columns of its state; a thread has 32 rows of a column. The blocks of a key head's
//            value heads form a cluster: they exchange the sums of squares of the norm, and no block replaces
//            the convolution's inputs before all others have read them.
// Shapes:    as in gated_delta.cu, with dk = dv = 128 and a convolution over 4 rows.
// Bytes:     8 Hv dk dv per sequence; in L2 each block also reads the inputs of q's and k's convolution.
// Flops:     7 Hv dk dv per sequence.
// Bound:     latency: state, weights and older inputs are loaded before the wait for the row, which then
//            passes three block barriers and one of the cluster.
// Numerics:  as in gated_delta.cu, in the same order: the same bits.
#include "kernels/cuda/dense/gated_delta_row.cuh"
#include "kernels/cuda/dense/gated_delta_row.h"
#include "kernels/cuda/dense/gated_delta_stream.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_cluster.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"

namespace fp4moe::cuda {
namespace {

constexpr int kDim = DeltaRow::kDim, kTaps = DeltaRow::kTaps, kKept = DeltaRow::kKept,
              kRows = DeltaRow::kRows, kGroups = DeltaRow::kGroups;
constexpr int kMaxSplits = 4;

// How a value head's columns are cut into blocks. A block's channels: q, k, and v of its columns.
template <int kSplitsT>
struct Cut {
  static constexpr int kSplits = kSplitsT, kColumns = kDim / kSplits, kThreads = kGroups * kColumns;
  static constexpr int kChannels = 2 * kDim + kColumns;
  static constexpr int kLoads = (kChannels + kThreads - 1) / kThreads;  // channels of a thread
  // With four splits, at most 72 registers: a warp on each quarter of an SM fits beside three of linear_few's
  // with a norm, and beside six without.
  static constexpr int kBlocksPerSm = kSplits == kMaxSplits ? 7 : 2 * kSplits;
};

// A block's shared memory. Channels: of q [kDim], of k [kDim], of v [kColumns].
template <class C>
struct alignas(16) RowShared {
  float4 taps[C::kChannels];
  float kept[C::kChannels][kKept];  // the convolution's inputs of older rows, oldest first; the oldest one
                                    // is replaced by the new row's
  float channels[C::kChannels];     // after the convolution
  float squares[2 * kDim / 32];     // sums over 32 channels of q and k
  float predicted[kGroups][C::kColumns], outputs[kGroups][C::kColumns];  // sums over a group's rows
  float output_squares[kDim / 32];                                       // sums over 32 of the head's columns
  uint64_t loaded, squares_there;  // barriers: of taps and kept; of output_squares
};

// A block's place: its head is number `head`, and its key head's blocks are a cluster.
struct Place {
  int head, split, key_head;
  __device__ __forceinline__ explicit Place(int splits)
      : head(static_cast<int>(blockIdx.x) / splits),
        split(static_cast<int>(blockIdx.x) % splits),
        key_head(static_cast<int>(ptx::cluster_id())) {}
};

// Keeps the compiler from computing an address later, after a wait.
__device__ __forceinline__ void compute_here(const float*& address) { asm volatile("" : "+l"(address)); }

// The convolution.
template <class C>
class Convolution {
 public:
  __device__ __forceinline__ Convolution(const GatedDeltaArgs& a, const Place& place, RowShared<C>& s)
      : s_(s) {
    const int keys = a.num_key_heads * kDim;
    first_[0] = place.key_head * kDim, first_[1] = keys + first_[0];
    first_[2] = 2 * keys + place.head * kDim + place.split * C::kColumns;
  }
  // Start to load the taps, and the inputs of older rows; called by one thread.
  __device__ __forceinline__ void load_taps(const float* from) const {
    load_parts(reinterpret_cast<float*>(s_.taps), from, kTaps);
  }
  __device__ __forceinline__ void load_kept(const float* from) const { load_parts(s_.kept[0], from, kKept); }
  // Adds up what does not depend on the new row, once all of it is loaded.
  __device__ __forceinline__ void add_kept(bool is_new) {
    ptx::mbarrier_wait(&s_.loaded, 0);
    each([&](int i, int c) {
      const float4 w = s_.taps[c];
      const float* const x = s_.kept[c];
      sums_[i] = is_new ? 0 : fmaf(w.z, x[2], fmaf(w.y, x[1], fmaf(w.x, x[0], 0.0f)));
    });
  }
  // Finds the row's inputs, for load().
  __device__ __forceinline__ void find(const float* row) {
    each([&](int i, int c) { compute_here(from_[i] = row + channel_of(c)); });
  }
  __device__ __forceinline__ void load() {
    each([&](int i, int) { inputs_[i] = __ldcg(from_[i]); });
  }
  // Puts the channels and the sums of the squares of q and k into shared memory.
  __device__ __forceinline__ void put() const {
    float squares[C::kLoads] = {};
    each([&](int i, int c) {
      const float x = silu(fmaf(s_.taps[c].w, inputs_[i], sums_[i]));
      s_.kept[c][0] = inputs_[i];
      s_.channels[c] = x;
      squares[i] = x * x;
    });
#pragma unroll
    for (int i = 0; i < C::kLoads; ++i) {
      const int c = static_cast<int>(threadIdx.x) + i * C::kThreads;
      if (i * C::kThreads >= 2 * kDim) break;
      squares[i] = warp_sum(squares[i]);
      if (c < 2 * kDim && c % 32 == 0) s_.squares[c / 32] = squares[i];
    }
  }
  // Replaces the slot's inputs; those of q and k only in the first block of a cluster.
  __device__ __forceinline__ void keep(float* kept, bool is_new, bool is_first) const {
    each([&](int, int c) {
      if (c < 2 * kDim && !is_first) return;
      float* const to = kept + channel_of(c) * kKept;
      to[0] = is_new ? 0 : s_.kept[c][1];
      to[1] = is_new ? 0 : s_.kept[c][2];
      to[2] = s_.kept[c][0];
    });
  }

 private:
  // Copies the parts for q, k and v of a matrix [channels, columns].
  __device__ __forceinline__ void load_parts(float* to, const float* from, int columns) const {
#pragma unroll
    for (int part = 0; part < 3; ++part)
      ptx::bulk_load(to + part * kDim * columns, from + int64_t{first_[part]} * columns,
                     static_cast<uint32_t>((part < 2 ? kDim : C::kColumns) * columns) * 4, &s_.loaded);
  }
  // Calls function(i, channel of the block) for this thread's channels.
  template <class Function>
  static __device__ __forceinline__ void each(const Function& function) {
#pragma unroll
    for (int i = 0; i < C::kLoads; ++i) {
      const int c = static_cast<int>(threadIdx.x) + i * C::kThreads;
      if ((i + 1) * C::kThreads <= C::kChannels || c < C::kChannels) function(i, c);
    }
  }
  __device__ __forceinline__ int channel_of(int c) const {
    return c + (c < kDim ? first_[0] : c < 2 * kDim ? first_[1] - kDim : first_[2] - 2 * kDim);
  }

  RowShared<C>& s_;
  int first_[3];  // first channels of the block's q, k and v
  const float* from_[C::kLoads];
  float sums_[C::kLoads], inputs_[C::kLoads];
};

// Called by one thread.
template <class C>
__device__ __forceinline__ void init_barriers(RowShared<C>& s) {
  ptx::mbarrier_init(&s.loaded, 1);
  ptx::mbarrier_init(&s.squares_there, C::kSplits == 1 ? kDim / 32 : 1);
  ptx::mbarrier_init_fence();
  if (C::kSplits > 1) ptx::mbarrier_arrive_expect_tx(&s.squares_there, sizeof(s.output_squares));
}

// What a thread of the first group needs for its output, besides the sums.
struct Output {
  int64_t at;
  float weight, gate;
};

// Writes the output once the sums of squares are there, which also keeps the block until all have arrived.
template <class C>
__device__ __forceinline__ void put_output(const GatedDeltaArgs& a, RowShared<C>& s, const Output& output,
                                           float o) {
  ptx::mbarrier_wait_acquire_cluster(&s.squares_there, 0);
  float squares = 0;
#pragma unroll
  for (int w = 0; w < kDim / 32; ++w) squares += s.output_squares[w];
  write_output(a.out, output.at, gated_output(o, squares, kDim, a.eps, output.weight, output.gate));
}

// Sends a warp's sum of the squares of 32 outputs to the blocks of its head. A single block keeps it, with no
// instruction of clusters: it may have been launched without one.
template <class C>
__device__ __forceinline__ void send_squares(RowShared<C>& s, const Place& place, int column, float o) {
  const float squares = warp_sum(o * o);
  const uint32_t lane = threadIdx.x % 32;
  if (lane >= C::kSplits) return;
  float& to = s.output_squares[column / 32];
  if constexpr (C::kSplits == 1) {
    to = squares;
    ptx::mbarrier_arrive(&s.squares_there);
  } else {
    const uint32_t block = ptx::cluster_ctarank() - static_cast<uint32_t>(place.split) + lane;
    ptx::st_async_cluster(ptx::map_cluster(ptx::shared_address(&to), block), squares,
                          ptx::map_cluster(ptx::shared_address(&s.squares_there), block));
  }
}

// Grid (Hv kSplits, sequences).
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm)
    gated_delta_row_kernel(const __grid_constant__ RowParams p) {
  __shared__ RowShared<C> s;
  ptx::grid_dependents_launch();
  const GatedDeltaArgs& a = p.args;
  const RowSequence sequence(p.sequences, static_cast<int>(blockIdx.y));
  const Place place(C::kSplits);
  Convolution<C> convolution(a, place, s);
  if (threadIdx.x == 0) {
    init_barriers(s);
    convolution.load_taps(a.conv_weight);
  }
  ptx::cluster_arrive_relaxed();
  const int group = static_cast<int>(threadIdx.x) / C::kColumns,
            of_block = static_cast<int>(threadIdx.x) % C::kColumns,
            column = place.split * C::kColumns + of_block;
  const float decay = __ldg(a.decay + place.head), dt_bias = __ldg(a.dt_bias + place.head),
              weight = __ldg(a.norm_weight + column);
  const bool loads_kept = sequence.has_row() && !sequence.is_new();
  if (threadIdx.x == 0) {
    if (loads_kept) convolution.load_kept(a.conv(sequence.slot));
    ptx::mbarrier_arrive_expect_tx(&s.loaded, sizeof(s.taps) + (loads_kept ? sizeof(s.kept) : 0));
  }
  StateColumn<kRows> state(a.recurrent(sequence.slot, place.head) + column, kDim, group * kRows, kRows);
  if (sequence.has_row()) state.load(sequence.is_new());
  ptx::cluster_wait();  // all blocks have started, and their barriers count
  convolution.add_kept(sequence.is_new());
  if (sequence.has_row()) ptx::cluster_arrive_relaxed();  // needs no more of the slot's inputs
  const int64_t t = sequence.row;
  const float *of_b = a.b + t * a.ba_stride + place.head, *of_a = a.a + t * a.ba_stride + place.head,
              *of_z = a.z + t * a.z_stride + place.head * kDim + column;
  convolution.find(a.qkv + t * a.qkv_stride);
  compute_here(of_b), compute_here(of_a), compute_here(of_z);
  ptx::grid_dependency_wait();
  if (!sequence.has_row()) return;  // padding: no block of the cluster arrives, to exit without the wait

  convolution.load();
  const float row_b = __ldcg(of_b), row_a = __ldcg(of_a), z = __ldcg(of_z);
  convolution.put();
  __syncthreads();
  const float *const q = s.channels, *const k = q + kDim;
  s.predicted[group][of_block] = state.dot(k);
  const float shrink = shrink_of(row_a, decay, dt_bias), beta = sigmoid(row_b);
  const Output output{t * a.out.cols + place.head * kDim + column, weight, silu(z)};
  const float of_k = factor_of_k(total_of(s.squares + kDim / 32)),
              of_q = factor_of_q(total_of(s.squares), kDim);
  __syncthreads();
  const float change = change_of(of_k, shrink, beta, k[kDim + of_block],
                                 sum_of_groups(s.predicted[0], kGroups, C::kColumns, of_block));
  s.outputs[group][of_block] = state.update(shrink, change, k, q);
  __syncthreads();
  float o = 0;
  if (group == 0) {
    o = of_q * sum_of_groups(s.outputs[0], kGroups, C::kColumns, of_block);
    send_squares(s, place, column, o);
  }
  state.store();
  if (group == 0) put_output(a, s, output, o);
  ptx::cluster_wait();
  convolution.keep(a.conv(sequence.slot), sequence.is_new(), ptx::cluster_ctarank() == 0);
}

template <int kSplits>
void run(const GatedDeltaArgs& args, int cluster) {
  using C = Cut<kSplits>;
  const auto kernel = gated_delta_row_kernel<C>;
  prepare_kernel(kernel, {.shares_sm = true});
  const DeviceStates& sequences = args.device_batch->states;
  launch("gated_delta_row", kernel,
         {.grid = dim3(static_cast<unsigned>(args.num_value_heads * kSplits),
                       static_cast<unsigned>(sequences.num_sequences)),
          .block = dim3(C::kThreads),
          .cluster = static_cast<unsigned>(cluster)},
         RowParams{args, sequences});
}

}  // namespace

bool gated_delta_row_fits(const GatedDeltaArgs& args) {
  return args.device_batch->states.max_rows <= 1 && args.slots.num_replay_rows == 0 &&
         args.key_head_dim == kDim && args.value_head_dim == kDim && args.conv_width == kTaps &&
         reinterpret_cast<uintptr_t>(args.conv_weight) % sizeof(float4) == 0 &&
         reinterpret_cast<uintptr_t>(args.slots.conv) % sizeof(float4) == 0 &&
         reinterpret_cast<uintptr_t>(args.slots.recurrent) % sizeof(float4) == 0;
}

// A head has as many blocks as fit into its cluster and keep the SMs busy; more would only load the inputs of
// q and k more often. If each SM has a key head, gated_delta_stream() takes 4% to 14% less time.
void gated_delta_row(const GatedDeltaArgs& args) {
  constexpr int kMaxCluster = 8, kBlocksPerSm = 2;
  const int heads = args.num_value_heads / args.num_key_heads;
  const int64_t sequences = args.device_batch->states.num_sequences,
                blocks = args.num_value_heads * sequences;
  const auto fits = [&](int splits) {
    return splits * heads <= kMaxCluster && splits * blocks <= kBlocksPerSm * device_limits().num_sms;
  };
  if (fits(4))
    run<4>(args, 4 * heads);
  else if (fits(2))
    run<2>(args, 2 * heads);
  else if (args.num_key_heads * sequences < device_limits().num_sms)
    run<1>(args, heads);
  else
    gated_delta_stream(args);
}

}  // namespace fp4moe::cuda
