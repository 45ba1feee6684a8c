// gated_delta: the recurrence for any number of rows; one row of common heads: gated_delta_row.h.
//
// Computes:  as documented in kernels/gated_delta.h. A block has one value head of one sequence, and its
//            state in registers: a thread has kRows rows of one column. The blocks of a key head's value
//            heads form a cluster, so that no block replaces what another has yet to read: the convolution's
//            inputs and the replay rows of the slot. Replayed rows and drafts run like all other rows,
//            but replayed rows have no outputs, and drafts do not change the slot's state.
// Shapes:    qkv [T, C], z [T, Hv dv], b and a [T, Hv]; state [dk, dv] per value head; out [T, Hv dv].
// Bytes:     8 Hv dk dv per sequence, and 4 (2 C + Hv dv) + 2 Hv dv per row; 4 (C + 2 Hv) per replayed row,
//            and 4 (C + 2 Hv) more per draft.
// Flops:     7 Hv dk dv per row.
// Bound:     decode: HBM (the states), or the launch for few sequences; many rows: the latency of
//            one row after another.
// Numerics:  f32 with expf and log1pf, quotients and roots to 2 units in the last place; sums over dk by
//            threads, then over the groups of rows in order, so a row's bits depend neither on other
//            sequences nor on how a prompt is cut.
#include <cuda_bf16.h>

#include <limits>
#include <string>

#include "base/check.h"
#include "kernels/cuda/dense/gated_delta_row.h"
#include "kernels/cuda/dense/gated_delta_state.cuh"
#include "kernels/cuda/dense_kernels.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_cluster.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/ref/dense_ref.h"

namespace fp4moe::cuda {
namespace {

constexpr int kMaxThreads = 512, kMaxWarps = kMaxThreads / 32;
constexpr int kRing = 8;  // rows of inputs in shared memory; a power of two
static_assert(kRing >= kMaxConvWidth);
constexpr int kRowsAhead = 8;  // of inputs that are fetched into L2

struct DeltaParams {
  GatedDeltaArgs args;
  DeviceStates sequences;
  int columns = 0;   // dv, rounded up to warps
  int groups = 0;    // of rows of the state; blockDim.x = groups * columns
  int keys = 0;      // groups * kRows: elements of q and k, padded with zeros
  int channels = 0;  // of a block: q, k, v

  int most_rows = 0;  // sequences with more, and with neither replayed rows nor drafts, are left alone
};

// Where a block's data are in shared memory.
struct DeltaShared {
  float *inputs, *weights;  // [kRing, channels] of the last rows; [conv_width, channels]: the taps
  float* vectors;           // [2, vector] of even and odd rows: [keys] q, [keys] k, [columns] v
  int vector;
  float *predicted, *outputs;  // [groups, columns]: partial sums
  float2* squares;             // [2, kMaxWarps] of even and odd rows: partial sums of q's and k's squares
  float* output_squares;       // [warps]
  float4* factors;             // of a row: put_factors()

  __device__ DeltaShared(const DeltaParams& p, float* base) {
    vector = 2 * p.keys + p.columns;
    vectors = base;
    predicted = vectors + 2 * vector;
    outputs = predicted + p.groups * p.columns;
    squares = reinterpret_cast<float2*>(outputs + p.groups * p.columns);
    output_squares = reinterpret_cast<float*>(squares + 2 * kMaxWarps);
    factors = reinterpret_cast<float4*>(output_squares + kMaxWarps);
    inputs = output_squares + kMaxWarps + 4;
    weights = inputs + kRing * p.channels;
  }
  __device__ float* vectors_of(int row) const { return vectors + (row & 1) * vector; }
  __device__ float2* squares_of(int row) const { return squares + (row & 1) * kMaxWarps; }
  static size_t num_bytes(const DeltaParams& p) {
    const int taps = (kRing + p.args.conv_width) * p.channels, vector = 2 * p.keys + p.columns;
    return sizeof(float) *
           static_cast<size_t>(2 * (vector + p.groups * p.columns) + taps + 5 * kMaxWarps + 4);
  }
};

// A block's sequence and head, and what does not depend on the rows of a thread. A thread has up to kChannels
// channels.
template <int kChannels>
class DeltaBlock {
 public:
  __device__ DeltaBlock(const DeltaParams& p, float* base)
      : p_(p), a_(p.args), s_(p, base), head_(static_cast<int>(blockIdx.x)) {
    const DeviceStates& of = p.sequences;
    first_row_ = of.first_row[blockIdx.y];
    num_rows_ = of.first_row[blockIdx.y + 1] - first_row_;
    slot_ = of.slots[blockIdx.y];
    is_new_ = of.first_position[blockIdx.y] == 0;
    first_ = -of.num_replayed[blockIdx.y];
    num_committed_ = num_rows_ - of.num_tentative[blockIdx.y];
    key_head_ = head_ / (a_.num_value_heads / a_.num_key_heads);
  }
  // Whether another kernel runs the sequence, or it has no rows; the same for all blocks of the cluster.
  __device__ bool is_left_alone() const {
    const bool has_drafts = first_ < 0 || num_committed_ < num_rows_;
    return num_rows_ == 0 || (num_rows_ > p_.most_rows && !has_drafts);
  }
  // The rows are [first(), num_rows()): replayed ones up to -1, then new ones, which are drafts from
  // num_committed() > 0 on.
  __device__ int first() const { return first_; }
  __device__ int num_rows() const { return num_rows_; }
  __device__ int num_committed() const { return num_committed_; }
  __device__ bool is_new() const { return is_new_; }
  __device__ float* state() const { return a_.recurrent(slot_, head_); }
  __device__ const DeltaShared& shared() const { return s_; }

  // What does not depend on the kernels before.
  __device__ void begin() {
    const int kept = a_.conv_width - 1;
    for (int i = static_cast<int>(threadIdx.x); i < 2 * (2 * p_.keys + p_.columns); i += blockDim.x)
      s_.vectors[i] = 0;  // also the padding
    decay_ = __ldg(a_.decay + head_), dt_bias_ = __ldg(a_.dt_bias + head_);
    each_channel([&](int c, int) {
      const int64_t channel = channel_of(c);
      for (int i = 0; i < a_.conv_width; ++i)
        s_.weights[i * p_.channels + c] = __ldg(a_.conv_weight + channel * a_.conv_width + i);
      for (int i = 0; i < kept; ++i)
        input(first_ + i - kept, c) = is_new_ ? 0 : a_.conv(slot_)[channel * kept + i];
    });
    __syncthreads();
    if (first_ == 0) leave_slot();
  }

  // Fetches a row's inputs.
  __device__ void load(int row) {
    if (row >= num_rows_) return;
    const bool is_replayed = row < 0;
    const int64_t t = first_row_ + row;
    const float* const u = is_replayed ? a_.replay(slot_, row - first_) : a_.qkv + t * a_.qkv_stride;
    const float* const b = is_replayed ? u + a_.conv_channels() : a_.b + t * a_.ba_stride;
    const float* const a = is_replayed ? b + a_.num_value_heads : a_.a + t * a_.ba_stride;
    each_channel([&](int c, int i) {
      const float* const at = u + channel_of(c);
      next_[i] = __ldcg(at);
      if (!is_replayed && row + kRowsAhead < num_rows_) prefetch(at + kRowsAhead * a_.qkv_stride);
    });
    next_b_ = __ldcg(b + head_);
    next_a_ = __ldcg(a + head_);
  }

  // The convolution of the row that was loaded last.
  __device__ void convolve(int row) {
    float* const to = s_.vectors_of(row);
    const int dk = a_.key_head_dim;
    float of_q = 0, of_k = 0;
    each_channel([&](int c, int i) {
      input(row, c) = next_[i];
      float sum = 0;
      for (int tap = 0; tap < a_.conv_width; ++tap)
        sum = fmaf(s_.weights[tap * p_.channels + c], input(row - a_.conv_width + 1 + tap, c), sum);
      const float x = silu(sum);
      to[c < dk ? c : c < 2 * dk ? p_.keys + c - dk : 2 * p_.keys + c - 2 * dk] = x;
      of_q += c < dk ? x * x : 0;
      of_k += c >= dk && c < 2 * dk ? x * x : 0;
    });
    of_q = warp_sum(of_q), of_k = warp_sum(of_k);
    if (threadIdx.x % 32 == 0) s_.squares_of(row)[threadIdx.x / 32] = {of_q, of_k};
    now_ = {next_b_, next_a_};
    if (row == -1) leave_slot();
  }

  // The factors of a row whose convolution is complete, by the last warp, for all threads: of q, of k, of the
  // state, and beta.
  __device__ void put_factors(int row) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, num_warps = static_cast<int>(blockDim.x) / 32;
    if (static_cast<int>(threadIdx.x) / 32 != num_warps - 1) return;
    const float2 part = lane < num_warps ? s_.squares_of(row)[lane] : float2{0, 0};
    const float of_q = warp_sum(part.x), of_k = warp_sum(part.y);
    if (lane != 0) return;
    *s_.factors = {factor_of_q(of_q, a_.key_head_dim), factor_of_k(of_k), shrink_of(now_.y, decay_, dt_bias_),
                   sigmoid(now_.x)};
  }

  __device__ float load_gate(int row, int column) const {
    if (row < 0 || column >= a_.value_head_dim) return 0;
    return __ldcg(a_.z + (first_row_ + row) * a_.z_stride + head_ * a_.value_head_dim + column);
  }

  __device__ float norm_weight(int column) const {
    return column < a_.value_head_dim ? __ldg(a_.norm_weight + column) : 0;
  }

  // The norm and gate of a row's output o; for the threads of the first group, once output_squares are there.
  __device__ void store(int row, int column, float o, float z, float weight) const {
    if (column >= a_.value_head_dim) return;
    float squares = 0;
    for (int w = 0; w < p_.columns / 32; ++w) squares += s_.output_squares[w];
    const float y = gated_output(o, squares, a_.value_head_dim, a_.eps, weight, silu(z));
    const int64_t at = (first_row_ + row) * a_.out.cols + head_ * a_.value_head_dim + column;
    if (a_.out.dtype == DType::kF32)
      static_cast<float*>(a_.out.data)[at] = y;
    else
      static_cast<bf16*>(a_.out.data)[at].bits = __bfloat16_as_ushort(__float2bfloat16_rn(y));
  }

  // Keeps the last inputs of rows that are not drafts; at most one row after them has been convolved.
  __device__ void keep_inputs() {
    ptx::cluster_wait();
    const int kept = a_.conv_width - 1;
    each_channel([&](int c, int) {
      if (!keeps(c)) return;
      for (int i = 0; i < kept; ++i)
        a_.conv(slot_)[channel_of(c) * kept + i] = input(num_committed_ - kept + i, c);
    });
  }

  // Keeps a draft's inputs in its replay row: the row that was convolved last, after keep_inputs().
  __device__ void keep_draft(int row) const {
    float* const to = a_.replay(slot_, row - num_committed_);
    each_channel([&](int c, int) {
      if (keeps(c)) to[channel_of(c)] = input(row, c);
    });
    if (threadIdx.x != 0) return;
    float* const gates = to + a_.conv_channels();
    gates[head_] = now_.x;
    gates[a_.num_value_heads + head_] = now_.y;
  }

 private:
  // Called once, when the block needs no more of the slot's conv inputs and replay rows.
  static __device__ void leave_slot() { ptx::cluster_arrive(); }
  // Whether this block writes the channel to the slot: those of q and k only for the first value head of a
  // key head.
  __device__ bool keeps(int c) const {
    return c >= 2 * a_.key_head_dim || head_ % (a_.num_value_heads / a_.num_key_heads) == 0;
  }
  // Calls function(channel of the block, i) for this thread's channels, always the same ones.
  template <class Function>
  __device__ void each_channel(const Function& function) const {
#pragma unroll
    for (int i = 0; i < kChannels; ++i)
      if (const int c = static_cast<int>(threadIdx.x + i * blockDim.x); c < p_.channels) function(c, i);
  }
  __device__ int64_t channel_of(int c) const {
    const int dk = a_.key_head_dim, keys = a_.num_key_heads * dk;
    if (c < dk) return key_head_ * dk + c;
    if (c < 2 * dk) return keys + key_head_ * dk + c - dk;
    return 2 * keys + int64_t{head_} * a_.value_head_dim + c - 2 * dk;
  }
  // The input of a row, or of one of the conv_width - 1 rows before the first.
  __device__ float& input(int row, int c) const { return s_.inputs[(row & (kRing - 1)) * p_.channels + c]; }
  static __device__ void prefetch(const float* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

  const DeltaParams& p_;
  const GatedDeltaArgs& a_;
  const DeltaShared s_;
  const int head_;
  int key_head_, first_row_, num_rows_, slot_;
  int first_, num_committed_;  // first(), num_committed()
  bool is_new_;
  float decay_, dt_bias_;
  float next_[kChannels], next_b_, next_a_;
  float2 now_;  // b and a of the row that was convolved last
};

// Grid (Hv, sequences). Between two barriers of a row, threads also convolve the next row and store the
// output of the row before. The state leaves the registers before the first draft.
template <int kRows, int kChannels>
__global__ void __launch_bounds__(kMaxThreads, 1) gated_delta_kernel(const __grid_constant__ DeltaParams p) {
  extern __shared__ float base[];
  ptx::grid_dependents_launch();
  DeltaBlock<kChannels> block(p, base);
  if (block.is_left_alone()) {
    ptx::grid_dependency_wait();  // the next kernel may wait for this one alone
    return;
  }
  const int first = block.first(), num_rows = block.num_rows(), num_committed = block.num_committed();
  const DeltaShared& s = block.shared();
  const int group = static_cast<int>(threadIdx.x) / p.columns,
            column = static_cast<int>(threadIdx.x) % p.columns;
  const int dk = p.args.key_head_dim, dv = p.args.value_head_dim;
  StateColumn<kRows> state(block.state() + column, dv, group * kRows,
                           column < dv ? min(kRows, dk - group * kRows) : 0);
  state.load(block.is_new());
  const float weight = block.norm_weight(column);
  block.begin();
  ptx::grid_dependency_wait();
  block.load(first);
  float o = 0, z = 0, next_z = group == 0 ? block.load_gate(first, column) : 0;
  block.convolve(first);
  if (first + 1 < num_rows) block.load(first + 1);
  __syncthreads();
  for (int row = first; row < num_rows; ++row) {
    const float* const q = s.vectors_of(row);
    const float* const k = q + p.keys;
    s.predicted[threadIdx.x] = state.dot(k);
    block.put_factors(row);
    if (row >= num_committed) block.keep_draft(row);
    if (row + 1 < num_rows) block.convolve(row + 1);
    if (row + 2 < num_rows) block.load(row + 2);
    __syncthreads();
    if (group == 0) {
      if (row > 0) block.store(row - 1, column, o, z, weight);
      z = next_z;
      if (row + 1 < num_rows) next_z = block.load_gate(row + 1, column);
    }
    const float4 f = *s.factors;
    const float change = change_of(f.y, f.z, f.w, q[2 * p.keys + column],
                                   sum_of_groups(s.predicted, p.groups, p.columns, column));
    s.outputs[threadIdx.x] = state.update(f.z, change, k, q);
    if (row + 1 == num_committed) {
      state.store();
      block.keep_inputs();
    }
    __syncthreads();
    if (group == 0) {
      o = f.x * sum_of_groups(s.outputs, p.groups, p.columns, column);
      const float squares = warp_sum(o * o);
      if (threadIdx.x % 32 == 0) s.output_squares[threadIdx.x / 32] = squares;
    }
  }
  __syncthreads();
  if (group == 0) block.store(num_rows - 1, column, o, z, weight);
}

template <int kRows, int kChannels>
void run(const DeltaParams& p) {
  const unsigned threads = static_cast<unsigned>(p.groups * p.columns);
  FP4MOE_CHECK(threads <= kMaxThreads && p.channels <= static_cast<int>(kChannels * threads),
               std::to_string(p.channels) + " channels for " + std::to_string(threads) + " threads");
  const auto kernel = gated_delta_kernel<kRows, kChannels>;
  prepare_kernel(kernel, {.shared_bytes = 80 << 10});
  launch("gated_delta", kernel,
         {.grid = dim3(static_cast<unsigned>(p.args.num_value_heads),
                       static_cast<unsigned>(p.sequences.num_sequences)),
          .block = dim3(threads),
          .shared_bytes = DeltaShared::num_bytes(p),
          .cluster = static_cast<unsigned>(p.args.num_value_heads / p.args.num_key_heads)},
         p);
}

template <int kRows>
void run(DeltaParams p) {
  p.groups = static_cast<int>(ceil_div(p.args.key_head_dim, kRows));
  p.keys = p.groups * kRows;
  if (p.channels > p.groups * p.columns)
    run<kRows, 3>(p);
  else
    run<kRows, 1>(p);
}

}  // namespace

void gated_delta(const GatedDeltaArgs& args, ThreadPool&) {
  gated_delta_rows(args, std::numeric_limits<int>::max());
}

void gated_delta_rows(const GatedDeltaArgs& args, int most_rows) {
  ref::check_gated_delta(args);
  FP4MOE_CHECK(args.num_value_heads <= kMaxDeltaCluster * args.num_key_heads,
               std::to_string(args.num_value_heads) + " value heads of " +
                   std::to_string(args.num_key_heads) + " key heads");
  if (gated_delta_row_fits(args)) return gated_delta_row(args);
  DeltaParams p;
  p.args = args;
  p.most_rows = most_rows;
  p.sequences = args.device_batch->states;
  p.columns = static_cast<int>(ceil_div(args.value_head_dim, 32)) * 32;
  p.channels = 2 * args.key_head_dim + args.value_head_dim;
  const int64_t rows = ceil_div(args.key_head_dim, kMaxThreads / p.columns);
  if (rows <= 8)
    run<8>(p);
  else if (rows <= 32)
    run<32>(p);
  else if (rows <= 64)
    run<64>(p);
  else
    run<128>(p);
}

}  // namespace fp4moe::cuda
