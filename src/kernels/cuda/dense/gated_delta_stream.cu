// gated_delta_stream: a step of decode with many sequences, one row each.
//
// Computes:  as documented in kernels/gated_delta.h, for one row. One block per SM, which runs key heads of
//            sequences, one value head after the other. Its warps have three tasks, each ahead of the next:
//            one thread moves states by bulk copies, a quarter (32 rows, 16 KiB) at a time, through a ring
//            of kStages states in shared memory; four warps convolve, with a thread for a channel of each of
//            q, k and v, and keep the slot's inputs; and four groups of two warps update, with a quarter of
//            the state in registers, a thread for two columns.
// Shapes:    as in gated_delta.cu, with dk = dv = 128 and a convolution over 4 rows.
// Bytes:     8 Hv dk dv per sequence, and 28 (2 Hk dk + Hv dv) for the convolution: 12 of older inputs and 16
// of taps,
//            which the L2 keeps.
// Flops:     7 Hv dk dv per sequence.
// Bound:     HBM: loads of two states are in flight, or have landed, while a third one is updated and stored.
//            Copies have no cache policy: with one that lets the L2 replace states first, 64 and 256
//            sequences take 3% and 7% longer.
// Measured:  on H200, 16 key heads and 32 value heads: 75 us for 64 sequences, the bytes at 3.6 TB/s.
// Numerics:  as in gated_delta.cu, in the same order: the same bits.
#include "kernels/cuda/dense/gated_delta_stream.h"

#include <algorithm>

#include "kernels/cuda/dense/gated_delta_row.cuh"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/cuda/ptx/ring_place.cuh"

namespace fp4moe::cuda {
namespace {

constexpr int kDim = DeltaRow::kDim, kKept = DeltaRow::kKept, kRows = DeltaRow::kRows,
              kGroups = DeltaRow::kGroups;
constexpr int kStages = 3;                              // states in shared memory
constexpr int kHeadRows = 2;                            // rows of a head that are convolved and not yet used
constexpr int kColumns = 2, kStride = kDim / kColumns;  // columns of a thread, and their distance
constexpr int kUpdaters = kGroups * kStride, kConvolvers = kDim, kThreads = kUpdaters + kConvolvers + 32;
constexpr int kWarpsOfGroup = kStride / 32, kQuarter = kRows * kDim;
constexpr int kUpdatersBarrier = 1, kOutputsBarrier = 2;  // named barriers

struct StreamParams {
  GatedDeltaArgs args;
  DeviceStates sequences;
  int heads_of_key = 0;                      // value heads
  int num_pairs = 0, num_longer = 0;         // of a block; the first num_longer blocks have one more
  int sequence_step = 0, key_head_step = 0;  // from one pair of a block to the next
};

// A row's q and k after the convolution, and the sums over 32 channels of their squares.
struct alignas(16) KeyRow {
  float q[kDim], k[kDim];
  float squares[2 * kDim / 32];
};

// What is specific to a value head.
struct alignas(16) HeadRow {
  float v[kDim], gates[kDim];
  float shrink, beta;
  int64_t output;  // index of its first output
  int keys;        // index of its KeyRow
  bool has_row, is_new;
};

struct alignas(128) StreamShared {
  float states[kStages][kGroups][kQuarter];
  KeyRow keys[kHeadRows];
  HeadRow heads[kHeadRows];
  float predicted[kGroups][kDim], outputs[kGroups][kDim];  // sums over a group's rows
  float output_squares[kDim / 32];                         // sums over 32 of the head's columns
  float* homes[kStages];                                   // of the states
  // Barriers. A quarter: is there; is updated, ready to be stored. A head's row: is convolved; is used.
  uint64_t loaded[kStages][kGroups], done[kStages][kGroups];
  uint64_t convolved[kHeadRows], used[kHeadRows];
};

using StagePlace = RingPlace<kStages>;
using HeadPlace = RingPlace<kHeadRows>;

// Called by one thread.
__device__ __forceinline__ void init_barriers(StreamShared& s) {
  for (int stage = 0; stage < kStages; ++stage)
    for (int group = 0; group < kGroups; ++group) {
      ptx::mbarrier_init(&s.loaded[stage][group], 1);
      ptx::mbarrier_init(&s.done[stage][group], kWarpsOfGroup);
    }
  for (int i = 0; i < kHeadRows; ++i) {
    ptx::mbarrier_init(&s.convolved[i], kConvolvers / 32);
    ptx::mbarrier_init(&s.used[i], kUpdaters / 32);
  }
  ptx::mbarrier_init_fence();
}

// Arrives once for the warp, after all of its threads.
__device__ __forceinline__ void arrive_warp(uint64_t* bar) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(bar);
}

// A key head of a sequence.
struct Pair {
  RowSequence sequence;
  int key_head;
};

// Calls function(pair, the pair after it or, for the last one, itself) for the block's pairs.
template <class Function>
__device__ __forceinline__ void each_pair(const StreamParams& p, const Function& function) {
  const int block = static_cast<int>(blockIdx.x), key_heads = p.args.num_key_heads;
  int num = p.num_pairs + (block < p.num_longer ? 1 : 0);
  int sequence = block / key_heads, key_head = block % key_heads;
  Pair pair{RowSequence(p.sequences, sequence), key_head};
  for (; num > 0; --num) {
    if (num > 1) {
      sequence += p.sequence_step, key_head += p.key_head_step;
      if (key_head >= key_heads) key_head -= key_heads, ++sequence;
    }
    const Pair next{RowSequence(p.sequences, sequence), key_head};
    function(pair, next);
    pair = next;
  }
}

// Moves the states; run by one thread.
class StateMover {
 public:
  __device__ __forceinline__ StateMover(const StreamParams& p, StreamShared& s) : p_(p), s_(s) {}
  __device__ __forceinline__ void run() {
    const int of_key = p_.heads_of_key;
    each_pair(p_, [&](const Pair& pair, const Pair&) {
      if (!pair.sequence.has_row()) return;
      for (int j = 0; j < of_key; ++j)
        load(p_.args.recurrent(pair.sequence.slot, pair.key_head * of_key + j), pair.sequence.is_new());
    });
    finish();
  }

 private:
  // Loads a state into the next stage, and stores the one that is there before.
  __device__ __forceinline__ void load(float* home, bool is_new) {
    const bool stores = num_loaded_ >= kStages;
    if (stores) store();
    load_quarter<0>(home, is_new, stores);
    load_quarter<1>(home, is_new, stores);
    load_quarter<2>(home, is_new, stores);
    load_quarter<3>(home, is_new, stores);
    s_.homes[place_.slot] = home;
    place_.next();
    ++num_loaded_;
  }
  template <int kGroup>
  __device__ __forceinline__ void load_quarter(const float* home, bool is_new, bool stores) const {
    if (stores) ptx::bulk_store_wait_read<kGroups - 1 - kGroup>();
    uint64_t* const loaded = &s_.loaded[place_.slot][kGroup];
    if (is_new) return ptx::mbarrier_arrive(loaded);
    ptx::mbarrier_arrive_expect_tx(loaded, kQuarter * sizeof(float));
    ptx::bulk_load(s_.states[place_.slot][kGroup], home + kGroup * kQuarter, kQuarter * sizeof(float),
                   loaded);
  }
  // Stores the state of the round before in this stage.
  __device__ __forceinline__ void store() const {
    float* const home = s_.homes[place_.slot];
    for (int group = 0; group < kGroups; ++group) {
      ptx::mbarrier_wait(&s_.done[place_.slot][group], place_.parity ^ 1);
      ptx::bulk_store(home + group * kQuarter, s_.states[place_.slot][group], kQuarter * sizeof(float));
      ptx::bulk_store_commit();
    }
  }
  // Stores the states that are left.
  __device__ __forceinline__ void finish() {
    if (num_loaded_ < kStages) place_ = {0, 1};
    for (int i = 0; i < min(num_loaded_, kStages); ++i) {
      store();
      place_.next();
    }
    ptx::bulk_store_wait();
  }

  const StreamParams& p_;
  StreamShared& s_;
  StagePlace place_;
  int num_loaded_ = 0;
};

// A channel of the convolution, in registers.
struct Channel {
  float4 taps;
  float kept[kKept];  // inputs of older rows, oldest first
  float input;

  __device__ __forceinline__ void load_older(const float* of_taps, const float* of_kept, int64_t at,
                                             bool is_new) {
    taps = __ldg(reinterpret_cast<const float4*>(of_taps) + at);
#pragma unroll
    for (int i = 0; i < kKept; ++i) kept[i] = is_new ? 0 : __ldcg(of_kept + at * kKept + i);
  }
  __device__ __forceinline__ float convolved(bool is_new) const {
    const float older =
        is_new ? 0 : fmaf(taps.z, kept[2], fmaf(taps.y, kept[1], fmaf(taps.x, kept[0], 0.0f)));
    return silu(fmaf(taps.w, input, older));
  }
  __device__ __forceinline__ void keep(float* of_kept, int64_t at) const {
    float* const to = of_kept + at * kKept;
    to[0] = kept[1], to[1] = kept[2], to[2] = input;
  }
};

// Convolves the rows; run by kConvolvers threads.
class Convolver {
 public:
  __device__ __forceinline__ Convolver(const StreamParams& p, StreamShared& s)
      : p_(p), a_(p.args), s_(s), thread_(static_cast<int>(threadIdx.x) - kUpdaters) {}
  __device__ __forceinline__ void run() {
    const int of_key = p_.heads_of_key;
    int keys = 0;
    bool is_first = true;
    each_pair(p_, [&](const Pair& pair, const Pair& next) {
      for (int j = 0; j < of_key; ++j) {
        convolve(pair, j, keys, is_first);
        if (j == 0) prefetch_kept(next);
        is_first = false;
      }
      keys ^= 1;
    });
  }

 private:
  // Value head number j of the pair. q and k are convolved with the first one.
  __device__ __forceinline__ void convolve(const Pair& pair, int j, int keys, bool is_first) {
    const RowSequence& sequence = pair.sequence;
    const int head = pair.key_head * p_.heads_of_key + j;
    const int first_part = !sequence.has_row() ? 3 : j > 0 ? 2 : 0;
    const int keys_before = a_.num_key_heads * kDim, of_q = pair.key_head * kDim + thread_;
    const int at[3] = {of_q, keys_before + of_q, 2 * keys_before + head * kDim + thread_};
    const float decay = __ldg(a_.decay + head), dt_bias = __ldg(a_.dt_bias + head);
    float* const kept = a_.conv(sequence.slot);
    Channel channels[3];
#pragma unroll
    for (int part = 0; part < 3; ++part)
      if (part >= first_part) channels[part].load_older(a_.conv_weight, kept, at[part], sequence.is_new());
    if (is_first) ptx::grid_dependency_wait();
    const int64_t t = sequence.row;
    float z = 0, row_a = 0, row_b = 0;
    if (sequence.has_row()) {
      const float* const row = a_.qkv + t * a_.qkv_stride;
#pragma unroll
      for (int part = 0; part < 3; ++part)
        if (part >= first_part) channels[part].input = __ldcg(row + at[part]);
      z = __ldcg(a_.z + t * a_.z_stride + head * kDim + thread_);
      row_a = __ldcg(a_.a + t * a_.ba_stride + head), row_b = __ldcg(a_.b + t * a_.ba_stride + head);
    }
    HeadRow& to = s_.heads[place_.slot];
    KeyRow& key_row = s_.keys[keys];
    ptx::mbarrier_wait(&s_.used[place_.slot], place_.parity ^ 1);
    if (first_part == 0) {
      put_keys(key_row.q, key_row.squares, channels[0].convolved(sequence.is_new()));
      put_keys(key_row.k, key_row.squares + kDim / 32, channels[1].convolved(sequence.is_new()));
    }
    if (sequence.has_row()) {
      to.v[thread_] = channels[2].convolved(sequence.is_new());
      to.gates[thread_] = silu(z);
    }
    if (thread_ == 0) {
      to.shrink = shrink_of(row_a, decay, dt_bias), to.beta = sigmoid(row_b);
      to.output = t * a_.out.cols + head * kDim;
      to.keys = keys;
      to.has_row = sequence.has_row(), to.is_new = sequence.is_new();
    }
    arrive_warp(&s_.convolved[place_.slot]);
    place_.next();
#pragma unroll
    for (int part = 0; part < 3; ++part)
      if (part >= first_part) channels[part].keep(kept, at[part]);
  }
  // Fetches the inputs of older rows into the L2: of q, of k, and of v of all value heads.
  __device__ __forceinline__ void prefetch_kept(const Pair& pair) const {
    constexpr int kLine = 128 / sizeof(float), kLines = kDim * kKept / kLine;  // of 128 channels
    if (!pair.sequence.has_row() || pair.sequence.is_new()) return;
    const int of_key = p_.heads_of_key, keys = a_.num_key_heads, lines = (2 + of_key) * kLines;
    const float* const kept = a_.conv(pair.sequence.slot);
    for (int i = thread_; i < lines; i += kConvolvers) {
      const int part = i / kLines, line = i % kLines;
      const int head = part < 2 ? part * keys + pair.key_head : 2 * keys + pair.key_head * of_key + part - 2;
      ptx::prefetch_l2(kept + (head * kLines + line) * kLine);
    }
  }
  __device__ __forceinline__ void put_keys(float* channels, float* squares, float x) const {
    channels[thread_] = x;
    const float sum = warp_sum(__fmul_rn(x, x));
    if (thread_ % 32 == 0) squares[thread_ / 32] = sum;
  }

  const StreamParams& p_;
  const GatedDeltaArgs& a_;
  StreamShared& s_;
  const int thread_;
  HeadPlace place_;
};

// Updates the states; run by kUpdaters threads.
class Updater {
 public:
  __device__ __forceinline__ Updater(const StreamParams& p, StreamShared& s)
      : p_(p),
        s_(s),
        group_(static_cast<int>(threadIdx.x) / kStride),
        column_(static_cast<int>(threadIdx.x) % kStride) {
    each_column([&](int i, int c) { weights_[i] = __ldg(p.args.norm_weight + c); });
  }
  __device__ __forceinline__ void run() {
    HeadPlace place;
    each_pair(p_, [&](const Pair&, const Pair&) {
      for (int j = 0; j < p_.heads_of_key; ++j) {
        ptx::mbarrier_wait(&s_.convolved[place.slot], place.parity);
        if (s_.heads[place.slot].has_row) update(s_.heads[place.slot]);
        arrive_warp(&s_.used[place.slot]);
        place.next();
      }
    });
  }

 private:
  // Calls function(i, column) for this thread's columns.
  template <class Function>
  __device__ __forceinline__ void each_column(const Function& function) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) function(i, column_ + i * kStride);
  }
  __device__ __forceinline__ void update(const HeadRow& head) {
    const KeyRow& keys = s_.keys[head.keys];
    uint64_t* const done = &s_.done[stage_.slot][group_];
    float* const rows = s_.states[stage_.slot][group_];
    StateColumn<kRows> states[kColumns] = {{kDim, group_ * kRows}, {kDim, group_ * kRows}};
    ptx::mbarrier_wait(&s_.loaded[stage_.slot][group_], stage_.parity);
    stage_.next();
    each_column([&](int i, int c) {
      states[i].load_copy(rows + c, head.is_new);
      s_.predicted[group_][c] = states[i].dot(keys.k);
    });
    const float shrink = head.shrink, of_k = factor_of_k(total_of(keys.squares + kDim / 32));
    ptx::named_barrier(kUpdatersBarrier, kUpdaters);
    float changes[kColumns];
    each_column([&](int i, int c) {
      changes[i] =
          change_of(of_k, shrink, head.beta, head.v[c], sum_of_groups(s_.predicted[0], kGroups, kDim, c));
    });
    each_column([&](int i, int c) {
      s_.outputs[group_][c] = states[i].update(shrink, changes[i], keys.k, keys.q);
      states[i].store_copy(rows + c);
    });
    ptx::fence_proxy_async();
    arrive_warp(done);
    ptx::named_barrier(kUpdatersBarrier, kUpdaters);
    if (group_ == 0) put_outputs(head, factor_of_q(total_of(keys.squares), kDim));
  }
  // Normalises and writes the outputs; called by the first group.
  __device__ __forceinline__ void put_outputs(const HeadRow& head, float of_q) const {
    float outputs[kColumns];
    each_column([&](int i, int c) {
      const float o = outputs[i] = of_q * sum_of_groups(s_.outputs[0], kGroups, kDim, c);
      const float sum = warp_sum(o * o);
      if (c % 32 == 0) s_.output_squares[c / 32] = sum;
    });
    ptx::named_barrier(kOutputsBarrier, kStride);
    float squares = 0;
#pragma unroll
    for (int w = 0; w < kDim / 32; ++w) squares += s_.output_squares[w];
    each_column([&](int i, int c) {
      write_output(p_.args.out, head.output + c,
                   gated_output(outputs[i], squares, kDim, p_.args.eps, weights_[i], head.gates[c]));
    });
  }

  const StreamParams& p_;
  StreamShared& s_;
  const int group_, column_;
  float weights_[kColumns];
  StagePlace stage_;
};

__global__ void __launch_bounds__(kThreads, 1)
    gated_delta_stream_kernel(const __grid_constant__ StreamParams p) {
  extern __shared__ __align__(128) uint8_t base[];
  StreamShared& s = *reinterpret_cast<StreamShared*>(base);
  ptx::grid_dependents_launch();
  if (threadIdx.x == 0) init_barriers(s);
  __syncthreads();
  if (threadIdx.x < kUpdaters)
    Updater(p, s).run();
  else if (threadIdx.x < kUpdaters + kConvolvers)
    Convolver(p, s).run();
  else if (threadIdx.x == kUpdaters + kConvolvers)
    StateMover(p, s).run();
}

}  // namespace

void gated_delta_stream(const GatedDeltaArgs& args) {
  StreamParams p{args, args.device_batch->states};
  const int pairs = static_cast<int>(p.sequences.num_sequences) * args.num_key_heads;
  const int blocks = std::min(pairs, device_limits().num_sms);
  p.heads_of_key = args.num_value_heads / args.num_key_heads;
  p.num_pairs = pairs / blocks, p.num_longer = pairs % blocks;
  p.sequence_step = blocks / args.num_key_heads, p.key_head_step = blocks % args.num_key_heads;
  prepare_kernel(gated_delta_stream_kernel, {.shared_bytes = sizeof(StreamShared), .shares_sm = true});
  launch("gated_delta_stream", gated_delta_stream_kernel,
         {.grid = dim3(static_cast<unsigned>(blocks)),
          .block = dim3(kThreads),
          .shared_bytes = sizeof(StreamShared)},
         p);
}

}  // namespace fp4moe::cuda
