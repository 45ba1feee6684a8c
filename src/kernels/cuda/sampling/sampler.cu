// Sampling with a cluster of 8 blocks per row, which holds the row in its shared memory.
//
// Computes:  SampleRows of kernels/device_sampler.h: greedy; plain temperature; top_k, top_p and min_p;
//            edited logits and masks; log-probabilities, also of a given id and of listed ids.
// Shapes:    logits [rows, V] f32, V <= 400000: each block holds an eighth of a row in shared memory.
// Bytes:     4 rows V, once; V / 8 per mask; 16 per edit for each block.
// Flops:     at most three double-precision exp per element.
// Bound:     the latency of the cluster's exchanges for a few rows; the exps for many rows.
// Numerics:  weights exp((x - max) / temperature) are computed in double, as on the CPU, and are then rounded
//            to integers in units of 2^-44 of the largest weight: sums are exact in any order, so every run
//            has the same bits. An id whose weight is below 2^-45 of the largest is never drawn. top_k, top_p
//            and the draw in rank order all search for the id at which a running count or weight over the
//            ranked ids passes a target, one digit of the logits' bits at a time (radix select). Edits match
//            the CPU's bit for bit; they are applied after the log-probabilities are computed, which use the
//            model's logits.
#include <cooperative_groups.h>

#include "base/check.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/cuda/sampling/sampler_greedy.h"
#include "kernels/cuda/sampling/sampler_keys.cuh"
#include "kernels/device_sampler.h"

namespace fp4moe {
namespace {

namespace cg = cooperative_groups;

constexpr int kBlocks = 8, kThreads = 512, kWarps = kThreads / 32;
constexpr int kDigitBits = 9, kBins = 1 << kDigitBits;
constexpr int kShare = kBins / kBlocks;  // bins that a block adds up for the cluster
constexpr double kOne = 0x1p44;          // the largest weight
static_assert(kBins == kThreads, "one thread per bin");

struct BinTotals {
  uint64_t weights[kShare];
  uint32_t counts[kShare];
};

// Where a running sum over the ranked ids passes its target: the ids whose key starts with `prefix`.
struct Cut {
  uint32_t prefix = 0;  // key >> shift
  int shift = 32;
  uint32_t count = 0;          // number of ids here: one, or all with the same logit
  uint64_t weight = 0;         // of all ids here
  uint64_t count_before = 0;   // number of ids ranked before
  uint64_t weight_before = 0;  // their weight

  __device__ bool is_here(uint32_t key) const { return shift == 32 || key >> shift == prefix; }
};

struct Shared {
  BinTotals first, later;  // for the first digit and for the current digit
  uint64_t published[2][2];
  uint64_t warp_sums[2][kWarps];
  uint32_t counts[kBins], weights_low[kBins], weights_high[kBins];
  Cut cut;
  uint32_t num_top;
  Ranked top[kMaxTopLogprobs];
};

// One block's part of a row.
// Large because the steps of sampling share the block's registers and shared memory.
class RowPart {
 public:
  __device__ RowPart(const SampleRowsArgs& a, Shared& shared, float* logits)
      : s_(shared), x_(logits), cluster_(cg::this_cluster()), rank_(static_cast<int>(cluster_.block_rank())) {
    const int part = static_cast<int>((a.vocab_size + kBlocks - 1) / kBlocks);
    first_id_ = rank_ * part;
    size_ = max(0, min(part, static_cast<int>(a.vocab_size) - first_id_));
    segment_ = (part + kThreads - 1) / kThreads | 1;  // odd: adjacent threads use different banks
  }

  __device__ void sample(const SampleRowsArgs& a, int64_t row);

 private:
  template <class Function>
  __device__ void each(Function function) const {  // passes element indices, adjacent within a warp
    for (int i = static_cast<int>(threadIdx.x); i < size_; i += kThreads) function(i);
  }
  __device__ int segment_begin() const { return min(size_, static_cast<int>(threadIdx.x) * segment_); }
  __device__ int segment_end() const { return min(size_, segment_begin() + segment_); }

  // ---- sums and maxima over the cluster, the same in all its threads ----
  struct Scan {
    uint64_t before, total;  // before: the sum of lower blocks and threads
  };
  __device__ uint64_t block_scan(uint64_t value, uint64_t (&warp_sums)[kWarps], uint64_t& total);
  __device__ Scan cluster_scan(uint64_t value);
  __device__ uint64_t cluster_max(uint64_t value);
  __device__ void publish(uint64_t value);  // sets remote() to thread 0's value; ends with a cluster barrier
  __device__ uint64_t remote(int block) {
    return *cluster_.map_shared_rank(&s_.published[parity_][0], block);
  }

  // ---- the parts of sample() ----
  __device__ bool load(const SampleRowsArgs& a, int64_t row);
  __device__ void mask(const SampleRowsArgs& a);
  __device__ bool find_best();  // returns false if there is no id to choose
  __device__ void edit(const SampleRowsArgs& a, const SampleRowParams& params);
  __device__ void keep_allowed(const uint32_t* allowed);
  __device__ void choose(const SampleRowParams& params);
  __device__ uint64_t weight_of(float x) const {
    return static_cast<uint64_t>(exp((static_cast<double>(x) - max_) / temperature_) * kOne + 0.5);
  }
  // Returns the weight of all ids that weigh at least `at_least`.
  __device__ uint64_t total_weight(uint64_t at_least = 0);
  __device__ void draw_in_id_order(double random);
  __device__ void draw_ranked(const SampleRowParams& params);
  // Called by one thread of the cluster. The model's logit is read again, since x_ may have been edited.
  __device__ void put_token(int32_t id) {
    out_->token_id = id;
    if (wants_logprobs_) out_->logprob = static_cast<float>(__ldcg(logits_ + id) - log_total_);
  }
  // Puts the nth (from 0) id in `cut`, in order of ids.
  __device__ void put_nth(const Cut& cut, uint64_t nth);
  __device__ void list_top(int32_t num_top);
  __device__ void list_ids(const SampleRowsArgs& a, const SampleRowParams& params) const;

  // ---- radix select ----
  __device__ void count_digit(const Cut& so_far, int bits, bool weighted, BinTotals& totals);
  __device__ Cut find_bin(BinTotals& totals, const Cut& so_far, int bits, bool by_count, uint64_t target);
  // Returns the place where the running count or weight passes `target`. Preconditions: target is less than
  // the count or weight of all ids; count_digit() is done for the first digit.
  __device__ Cut select(bool by_count, uint64_t target);

  Shared& s_;
  float* const x_;                 // [size_]
  const float* logits_ = nullptr;  // the row
  cg::cluster_group cluster_;
  int rank_, parity_ = 0;
  int32_t first_id_, size_, segment_;
  double max_ = 0, temperature_ = 1, log_total_ = 0;
  int32_t best_id_ = 0;     // the id of the largest logit
  uint64_t num_valid_ = 0;  // ids whose logit is not -infinity
  bool wants_logprobs_ = false, is_weighted_ = false;
  SampledRow* out_ = nullptr;
};

// ---- sums -------------------------------------------------------------------------------------------

__device__ uint64_t RowPart::block_scan(uint64_t value, uint64_t (&warp_sums)[kWarps], uint64_t& total) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t sum = value;
  for (unsigned offset = 1; offset < 32; offset *= 2) {
    const uint64_t lower = __shfl_up_sync(~0u, sum, offset);
    if (lane >= offset) sum += lower;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  uint64_t before = sum - value;
  total = 0;
  for (unsigned i = 0; i < kWarps; ++i) {
    if (i == warp) before += total;
    total += warp_sums[i];
  }
  __syncthreads();
  return before;
}

__device__ void RowPart::publish(uint64_t value) {
  parity_ ^= 1;  // other blocks may still be reading the other slot
  if (threadIdx.x == 0) s_.published[parity_][0] = value;
  cluster_.sync();
}

__device__ RowPart::Scan RowPart::cluster_scan(uint64_t value) {
  uint64_t block_total = 0;
  Scan scan{block_scan(value, s_.warp_sums[0], block_total), 0};
  publish(block_total);
  for (int i = 0; i < kBlocks; ++i) {
    if (i == rank_) scan.before += scan.total;
    scan.total += remote(i);
  }
  return scan;
}

__device__ uint64_t RowPart::cluster_max(uint64_t value) {
  for (int offset = 16; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(~0u, value, offset));
  if (threadIdx.x % 32 == 0) s_.warp_sums[0][threadIdx.x / 32] = value;
  __syncthreads();
  for (const uint64_t other : s_.warp_sums[0]) value = max(value, other);
  publish(value);  // ends with a barrier, after which warp_sums can be reused
  for (int i = 0; i < kBlocks; ++i) value = max(value, remote(i));
  return value;
}

// ---- radix select -----------------------------------------------------------------------------------

// Sets totals for this block's share of the bins: counts and weights of the cluster's ids in `so_far`, by the
// next digit of their keys.
__device__ void RowPart::count_digit(const Cut& so_far, int bits, bool weighted, BinTotals& totals) {
  s_.counts[threadIdx.x] = s_.weights_low[threadIdx.x] = s_.weights_high[threadIdx.x] = 0;
  __syncthreads();
  each([&](int i) {
    const uint32_t key = key_of(x_[i]);
    if (x_[i] == -kInfinity || !so_far.is_here(key)) return;
    const uint32_t bin = key >> (so_far.shift - bits) & ((1u << bits) - 1);
    atomicAdd(&s_.counts[bin], 1u);
    if (!weighted) return;
    const uint64_t weight = weight_of(x_[i]);
    const auto low = static_cast<uint32_t>(weight);
    const uint32_t carry = atomicAdd(&s_.weights_low[bin], low) + low < low ? 1 : 0;
    if (const uint32_t high = static_cast<uint32_t>(weight >> 32) + carry; high != 0)
      atomicAdd(&s_.weights_high[bin], high);
  });
  cluster_.sync();
  if (threadIdx.x < kShare) {
    const unsigned bin = rank_ * kShare + threadIdx.x;
    uint32_t count = 0;
    uint64_t weight = 0;
    for (int i = 0; i < kBlocks; ++i) {
      count += *cluster_.map_shared_rank(&s_.counts[bin], i);
      weight += *cluster_.map_shared_rank(&s_.weights_low[bin], i);
      weight += static_cast<uint64_t>(*cluster_.map_shared_rank(&s_.weights_high[bin], i)) << 32;
    }
    totals.counts[threadIdx.x] = count;
    totals.weights[threadIdx.x] = weight;
  }
  cluster_.sync();
}

__device__ Cut RowPart::find_bin(BinTotals& totals, const Cut& so_far, int bits, bool by_count,
                                 uint64_t target) {
  const unsigned bin = kBins - 1 - threadIdx.x;  // the best bin first
  const BinTotals& share = *cluster_.map_shared_rank(&totals, bin / kShare);
  const uint32_t count = share.counts[bin % kShare];
  const uint64_t weight = share.weights[bin % kShare];
  uint64_t total = 0;
  const uint64_t count_before = so_far.count_before + block_scan(count, s_.warp_sums[0], total);
  const uint64_t weight_before = so_far.weight_before + block_scan(weight, s_.warp_sums[1], total);
  const uint64_t before = by_count ? count_before : weight_before;
  if (before <= target && target - before < (by_count ? count : weight))
    s_.cut = {so_far.shift == 32 ? bin : so_far.prefix << bits | bin,
              so_far.shift - bits,
              count,
              weight,
              count_before,
              weight_before};
  __syncthreads();
  return s_.cut;
}

__device__ Cut RowPart::select(bool by_count, uint64_t target) {
  Cut cut = find_bin(s_.first, {}, kDigitBits, by_count, target);
  while (cut.shift > 0 && cut.count > 1) {
    const int bits = min(kDigitBits, cut.shift);
    count_digit(cut, bits, is_weighted_, s_.later);
    cut = find_bin(s_.later, cut, bits, by_count, target);
  }
  return cut;
}

// ---- the parts of sample() --------------------------------------------------------------------------

// Returns false if the row contains NaN or +infinity, or only -infinity. Sets max_ to the row's maximum.
__device__ bool RowPart::load(const SampleRowsArgs& a, int64_t row) {
  logits_ = a.logits + row * a.row_stride;
  const float* logits = logits_ + first_id_;
  uint32_t best = 0;  // a key; NaN and +infinity are above all others
#pragma unroll 8
  for (int i = static_cast<int>(threadIdx.x); i < size_; i += kThreads) {
    const float x = __ldcg(logits + i);
    x_[i] = x;
    best = max(best, x < kInfinity ? key_of(x) : ~0u);
  }
  best = static_cast<uint32_t>(cluster_max(best));
  max_ = logit_of(best);
  return best != ~0u && best > key_of(-kInfinity);
}

__device__ void RowPart::mask(const SampleRowsArgs& a) {
  if (a.masked == nullptr) return;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < size_; i += kThreads)
    if (is_masked(a, first_id_ + i)) x_[i] = -kInfinity;
  __syncthreads();
}

__device__ bool RowPart::find_best() {
  uint64_t best = 0, num_valid = 0;  // key, then the lower id
  each([&](int i) {
    if (x_[i] == -kInfinity) return;
    ++num_valid;
    best = max(best, uint64_t{key_of(x_[i])} << 32 | static_cast<uint32_t>(~(first_id_ + i)));
  });
  best = cluster_max(best);
  num_valid_ = cluster_scan(num_valid).total;
  if (num_valid_ == 0) return false;
  max_ = logit_of(static_cast<uint32_t>(best >> 32));
  best_id_ = ~static_cast<int32_t>(best);
  return true;
}

// No id is in the list twice, except perhaps as the negative id.
__device__ void RowPart::edit(const SampleRowsArgs& a, const SampleRowParams& params) {
  for (const bool is_last : {false, true}) {
    for (int32_t j = static_cast<int32_t>(threadIdx.x); j < params.num_edits; j += kThreads) {
      const LogitEdit e = a.edits[params.first_edit + j];
      if (is_last != e.token_id < 0) continue;
      const int32_t id = is_last ? __ldcg(a.chosen.ids + ~e.token_id * a.chosen.stride) : e.token_id;
      const int32_t i = id - first_id_;
      if (i < 0 || i >= size_) continue;
      float x = __fadd_rn(x_[i], e.add);  // the intrinsics keep the compiler from fusing operations
      x = x < 0 ? __fmul_rn(x, e.scale) : __fdiv_rn(x, e.scale);
      x_[i] = fminf(__fadd_rn(x, e.bias), 3.402823466e38f);
    }
    __syncthreads();
  }
}

__device__ uint64_t RowPart::total_weight(uint64_t at_least) {
  uint64_t sum = 0;
  each([&](int i) {
    const uint64_t weight = weight_of(x_[i]);  // 0 for -infinity
    if (weight >= at_least) sum += weight;
  });
  return cluster_scan(sum).total;
}

// Draws the first id at which the running weight exceeds `random` times the total.
__device__ void RowPart::draw_in_id_order(double random) {
  uint64_t sum = 0;
  for (int i = segment_begin(); i < segment_end(); ++i) sum += weight_of(x_[i]);
  const Scan scan = cluster_scan(sum);
  const uint64_t target =
      min(static_cast<uint64_t>(random * static_cast<double>(scan.total)), scan.total - 1);
  if (target < scan.before || target - scan.before >= sum) return;
  uint64_t running = scan.before;
  for (int i = segment_begin(); i < segment_end(); ++i) {
    running += weight_of(x_[i]);
    if (running > target) return put_token(first_id_ + i);
  }
}

// kept: the weight of the ranked ids that can be drawn, cut by top_k, then by top_p, then by min_p.
__device__ void RowPart::draw_ranked(const SampleRowParams& params) {
  uint64_t kept;
  if (params.top_k > 0 && static_cast<uint64_t>(params.top_k) < num_valid_) {
    const Cut last = select(/*by_count=*/true, static_cast<uint64_t>(params.top_k) - 1);
    kept = last.weight_before +
           last.weight / last.count * (static_cast<uint64_t>(params.top_k) - last.count_before);
  } else {
    kept = total_weight();
  }
  if (params.top_p < 1) {
    const double wanted = ceil(static_cast<double>(params.top_p) * static_cast<double>(kept));
    const uint64_t needed = min(max(static_cast<uint64_t>(wanted), uint64_t{1}), kept);
    const Cut last = select(/*by_count=*/false, needed - 1);
    const uint64_t each_weighs = last.weight / last.count;
    const uint64_t num_here = (needed - last.weight_before + each_weighs - 1) / each_weighs;
    kept = last.weight_before + num_here * each_weighs;
  }
  if (params.min_p > 0)
    kept = min(kept, total_weight(static_cast<uint64_t>(static_cast<double>(params.min_p) * kOne + 0.5)));
  const uint64_t target = min(static_cast<uint64_t>(params.random * static_cast<double>(kept)), kept - 1);
  const Cut drawn = select(/*by_count=*/false, target);
  put_nth(drawn, (target - drawn.weight_before) / (drawn.weight / drawn.count));
}

__device__ void RowPart::put_nth(const Cut& cut, uint64_t nth) {
  const auto is_here = [&](int i) { return x_[i] != -kInfinity && cut.is_here(key_of(x_[i])); };
  uint64_t here = 0;
  for (int i = segment_begin(); i < segment_end(); ++i) here += is_here(i);
  uint64_t index = cluster_scan(here).before;
  for (int i = segment_begin(); i < segment_end() && index <= nth; ++i)
    if (is_here(i) && index++ == nth) put_token(first_id_ + i);
}

// Lists the first `num_top` ids in rank order. They are gathered in the first block, in any order, and sorted
// there.
__device__ void RowPart::list_top(int32_t num_top) {
  const uint64_t wanted = min(static_cast<uint64_t>(num_top), num_valid_);
  const Cut last = select(/*by_count=*/true, wanted - 1);
  const uint64_t num_here = wanted - last.count_before;
  Shared& collector = *cluster_.map_shared_rank(&s_, 0);
  const auto prefix_of = [&](int i) { return key_of(x_[i]) >> last.shift; };
  uint64_t here = 0;
  for (int i = segment_begin(); i < segment_end(); ++i)
    here += x_[i] != -kInfinity && prefix_of(i) == last.prefix;
  uint64_t index = cluster_scan(here).before;
  for (int i = segment_begin(); i < segment_end(); ++i) {
    if (x_[i] == -kInfinity || prefix_of(i) < last.prefix) continue;
    if (prefix_of(i) == last.prefix && index++ >= num_here) continue;
    collector.top[atomicAdd(&collector.num_top, 1u)] = {key_of(x_[i]), first_id_ + i};
  }
  cluster_.sync();
  if (rank_ != 0 || threadIdx.x >= wanted) return;
  const Ranked mine = s_.top[threadIdx.x];
  int place = 0;
  for (uint64_t i = 0; i < wanted; ++i) place += s_.top[i].is_before(mine);
  out_->top_ids[place] = mine.id;
  out_->top_logprobs[place] = static_cast<float>(logit_of(mine.key) - log_total_);
  if (threadIdx.x == 0) out_->num_top = static_cast<int32_t>(wanted);
}

// The first block reads the model's logits of all listed ids, wherever they are in the row.
__device__ void RowPart::list_ids(const SampleRowsArgs& a, const SampleRowParams& params) const {
  if (rank_ != 0) return;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < params.num_logprob_ids; i += kThreads) {
    const int32_t at = params.first_logprob_id + i;
    a.id_logprobs[at] = static_cast<float>(__ldcg(logits_ + __ldcg(a.logprob_ids + at)) - log_total_);
  }
}

__device__ void RowPart::keep_allowed(const uint32_t* allowed) {
  each([&](int i) {
    const int32_t id = first_id_ + i;
    if ((__ldg(allowed + id / 32) >> (id % 32) & 1) == 0) x_[i] = -kInfinity;
  });
  __syncthreads();
}

// Chooses among the ids that are left. Called after find_best() and, if is_weighted_, after count_digit() for
// the first digit.
__device__ void RowPart::choose(const SampleRowParams& params) {
  if (params.temperature == 0) {
    if (rank_ == 0 && threadIdx.x == 0) put_token(best_id_);
  } else if (is_weighted_) {
    draw_ranked(params);
  } else {
    draw_in_id_order(params.random);
  }
}

__device__ void RowPart::sample(const SampleRowsArgs& a, int64_t row) {
  const SampleRowParams params = a.params[row];
  out_ = a.out + row;
  const bool is_leader = rank_ == 0 && threadIdx.x == 0;
  if (is_leader) out_->status = SampleStatus::kOk, out_->token_id = 0, out_->num_top = 0;
  if (threadIdx.x == 0) s_.num_top = 0;
  if (!load(a, row)) {
    if (is_leader) out_->status = SampleStatus::kBadLogits;
    return;
  }
  wants_logprobs_ = params.top_logprobs >= 0;
  if (wants_logprobs_) log_total_ = max_ + log(static_cast<double>(total_weight()) / kOne);
  list_ids(a, params);
  mask(a);
  const bool is_given = params.given_id >= 0, is_drawn = !is_given && params.temperature != 0;
  is_weighted_ = is_drawn && (params.top_k > 0 || params.top_p < 1 || params.min_p > 0);
  temperature_ = is_drawn ? params.temperature : 1;
  bool has_token = find_best();
  if (has_token && (is_weighted_ || params.top_logprobs > 0))
    count_digit({}, kDigitBits, is_weighted_, s_.first);
  if (has_token && params.top_logprobs > 0) list_top(min(params.top_logprobs, kMaxTopLogprobs));
  if (is_given) {
    if (is_leader) put_token(params.given_id);
    return;
  }
  if (params.num_edits > 0 || params.allowed >= 0) {
    if (params.num_edits > 0) edit(a, params);
    if (params.allowed >= 0) keep_allowed(a.allowed + params.allowed * ((a.vocab_size + 31) / 32));
    has_token = find_best();
    if (has_token && is_weighted_) count_digit({}, kDigitBits, is_weighted_, s_.first);
  }
  if (has_token) return choose(params);
  if (is_leader) out_->status = SampleStatus::kNoToken;
}

// Copies the row's result to a.copy. Called by the cluster's first block.
__device__ void copy_result(const SampleRowsArgs& a, int64_t row) {
  constexpr unsigned kWords = sizeof(SampledRow) / sizeof(uint32_t);
  if (a.copy == nullptr || threadIdx.x >= kWords) return;
  reinterpret_cast<uint32_t*>(a.copy + row)[threadIdx.x] =
      __ldcg(reinterpret_cast<const uint32_t*>(a.out + row) + threadIdx.x);
}

__global__ void __cluster_dims__(kBlocks) __launch_bounds__(kThreads, 2)
    sample_kernel(const __grid_constant__ SampleRowsArgs a) {
  extern __shared__ __align__(16) uint8_t memory[];
  __shared__ Shared shared;
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const int64_t row = blockIdx.x / kBlocks;
  RowPart part(a, shared, reinterpret_cast<float*>(memory));
  part.sample(a, row);
  __threadfence();            // a block other than the first may have put the token
  cg::this_cluster().sync();  // other blocks may still read this block's shared memory
  if (blockIdx.x % kBlocks == 0) copy_result(a, row);
}

void sample_rows(const SampleRowsArgs& args) {
  const auto blocks = static_cast<unsigned>(args.num_rows * kBlocks);
  if (args.all_greedy) return sample_greedy(args);
  const int64_t part_bytes = ceil_div(args.vocab_size, kBlocks) * static_cast<int64_t>(sizeof(float));
  const int64_t room = device_limits().shared_bytes_per_block - static_cast<int64_t>(sizeof(Shared));
  FP4MOE_CHECK(part_bytes <= room, "vocab_size=" + std::to_string(args.vocab_size) + "; legal: at most " +
                                       std::to_string(room / 4 * kBlocks));
  prepare_kernel(sample_kernel, {.shared_bytes = static_cast<int>(room)});
  launch("sample_rows", sample_kernel, {dim3(blocks), dim3(kThreads), static_cast<size_t>(part_bytes)}, args);
}

}  // namespace

SampleRows cuda_sample_rows() { return sample_rows; }

}  // namespace fp4moe
