// The collectives. Operands are transferred in pieces, one lockstep step per piece (communicator.cc). Every
// element is summed in rank order, independent of the pieces, so all ranks get the same bits.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "comm/communicator_state.h"

namespace fp4moe {
namespace {

constexpr int64_t kF32 = sizeof(float);
// Up to this size an all_reduce sends whole operands to all ranks: one step instead of two.
constexpr int64_t kOneStepBytes = 64 << 10;

const uint8_t* bytes_of(const void* data) { return static_cast<const uint8_t*>(data); }

void copy(void* to, const void* from, int64_t num_bytes) {
  if (num_bytes > 0 && to != from) std::memmove(to, from, static_cast<size_t>(num_bytes));
}

// Size of the next piece, at most `limit`, of a part of `total` bytes, of which `done` have been transferred.
int64_t piece_bytes(int64_t total, int64_t done, int64_t limit) {
  return std::clamp(total - done, int64_t{0}, limit);
}

// Each rank sends the same data to all ranks; all ranks send the same number of bytes.
struct EqualParts : StepParts {
  explicit EqualParts(ConstBytes m) : mine(m) {}
  ConstBytes to(int) const override { return mine; }
  int64_t bytes_from(int) const override { return mine.num_bytes; }
  ConstBytes mine;
};

// Each rank sends the same data to all ranks; the number of bytes differs between ranks.
struct RaggedParts : StepParts {
  RaggedParts(ConstBytes m, const std::vector<int64_t>& f) : mine(m), from(f) {}
  ConstBytes to(int) const override { return mine; }
  int64_t bytes_from(int rank) const override { return from[static_cast<size_t>(rank)]; }
  ConstBytes mine;
  const std::vector<int64_t>& from;
};

// Each destination gets a different part of `data`.
struct PartToEach : StepParts {
  PartToEach(const uint8_t* d, const std::vector<int64_t>& o, const std::vector<int64_t>& n, int64_t expected)
      : data(d), offsets(o), num_bytes(n), from_each(expected) {}
  ConstBytes to(int rank) const override {
    return {data + offsets[static_cast<size_t>(rank)], num_bytes[static_cast<size_t>(rank)]};
  }
  int64_t bytes_from(int) const override { return from_each; }
  const uint8_t* data;
  const std::vector<int64_t>& offsets;
  const std::vector<int64_t>& num_bytes;
  int64_t from_each;
};

// Each pair of ranks has a different number of bytes.
struct PairParts : StepParts {
  PairParts(const uint8_t* d, const std::vector<int64_t>& o, const std::vector<int64_t>& n,
            const std::vector<int64_t>& f)
      : data(d), offsets(o), num_bytes(n), from(f) {}
  ConstBytes to(int rank) const override {
    const auto r = static_cast<size_t>(rank);
    return {num_bytes[r] > 0 ? data + offsets[r] : nullptr, num_bytes[r]};
  }
  int64_t bytes_from(int rank) const override { return from[static_cast<size_t>(rank)]; }
  const uint8_t* data;
  const std::vector<int64_t>& offsets;
  const std::vector<int64_t>& num_bytes;
  const std::vector<int64_t>& from;
};

// out[i] = sum over sources in order; out may be one of the sources.
void sum_in_order(std::span<const float* const> sources, int64_t num_elems, float* out) {
  constexpr int64_t kBlock = 1024;
  float sum[kBlock];
  for (int64_t begin = 0; begin < num_elems; begin += kBlock) {
    const int64_t n = std::min(kBlock, num_elems - begin);
    copy(sum, sources[0] + begin, n * kF32);
    for (size_t s = 1; s < sources.size(); ++s) {
      const float* x = sources[s] + begin;
      for (int64_t i = 0; i < n; ++i) sum[i] += x[i];
    }
    copy(out + begin, sum, n * kF32);
  }
}

int64_t total_of(std::span<const int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

void check_counts(const char* op, std::span<const int64_t> counts, int size) {
  FP4MOE_CHECK(static_cast<int>(counts.size()) == size, std::string(op) + ": " +
                                                            std::to_string(counts.size()) + " counts for " +
                                                            std::to_string(size) + " ranks");
  for (const int64_t count : counts)
    FP4MOE_CHECK(count >= 0, std::string(op) + ": a count of " + std::to_string(count));
}

}  // namespace

Status Communicator::exchange(const OpName& op, const void* mine, int64_t num_bytes, void* all) {
  State& s = *state_;
  FP4MOE_CHECK(num_bytes >= 0 && num_bytes <= s.records.part_bytes,
               std::string(op.op) + ": a record of " + std::to_string(num_bytes) + " bytes; the limit is " +
                   std::to_string(s.records.part_bytes));
  const Operation operation = s.begin(op, OpKind::kExchange, 0, num_bytes);
  FP4MOE_RETURN_IF_ERROR(s.step(operation, s.records, EqualParts({mine, num_bytes})));
  uint8_t* out = static_cast<uint8_t*>(all);
  for (int r = 0; r < s.size; ++r)
    if (num_bytes > 0) copy(out + r * num_bytes, r == s.me ? mine : s.part_from(s.records, r), num_bytes);
  return {};
}

// Gathers all ranks' parts into `out`, in pieces; part r has counts[r] bytes at starts[r], and this rank's
// part is already in place.
static Status gather_parts(Communicator::State& s, const Operation& operation,
                           std::span<const int64_t> counts, std::span<const int64_t> starts, uint8_t* out) {
  const int64_t most = *std::max_element(counts.begin(), counts.end());
  const StepArea& area = most <= s.records.part_bytes ? s.records : s.staging;
  std::vector<int64_t>& now = s.expected;
  int64_t done = 0;
  do {
    for (size_t r = 0; r < counts.size(); ++r) now[r] = piece_bytes(counts[r], done, area.part_bytes);
    const size_t me = static_cast<size_t>(s.me);
    const RaggedParts parts({now[me] > 0 ? out + starts[me] + done : nullptr, now[me]}, now);
    FP4MOE_RETURN_IF_ERROR(s.step(operation, area, parts));
    for (size_t r = 0; r < counts.size(); ++r)
      if (r != me && now[r] > 0) copy(out + starts[r] + done, s.part_from(area, static_cast<int>(r)), now[r]);
    done += area.part_bytes;
  } while (done < most);
  return {};
}

Status Communicator::all_gather(const OpName& op, const void* mine, std::span<const int64_t> counts,
                                void* out) {
  State& s = *state_;
  check_counts(op.op, counts, s.size);
  const Operation operation = s.begin(op, OpKind::kAllGather, geometry_hash(counts), total_of(counts));
  std::exclusive_scan(counts.begin(), counts.end(), s.starts.begin(), int64_t{0});
  const size_t me = static_cast<size_t>(s.me);
  uint8_t* bytes = static_cast<uint8_t*>(out);
  if (counts[me] > 0) copy(bytes + s.starts[me], mine, counts[me]);
  return gather_parts(s, operation, counts, s.starts, bytes);
}

Status Communicator::all_to_all(const OpName& op, const void* mine, std::span<const int64_t> counts,
                                void* out) {
  State& s = *state_;
  const auto size = static_cast<size_t>(s.size), me = static_cast<size_t>(s.me);
  check_counts(op.op, counts, s.size * s.size);
  const Operation operation = s.begin(op, OpKind::kAllToAll, geometry_hash(counts), total_of(counts));
  std::vector<int64_t> sent(size), received(size);  // where this rank's bytes for and from each rank start
  std::exclusive_scan(counts.begin() + s.me * s.size, counts.begin() + (s.me + 1) * s.size, sent.begin(),
                      int64_t{0});
  for (size_t r = 1; r < size; ++r) received[r] = received[r - 1] + counts[(r - 1) * size + me];
  const uint8_t* from = bytes_of(mine);
  auto* to = static_cast<uint8_t*>(out);
  if (const int64_t own = counts[me * size + me]; own > 0) copy(to + received[me], from + sent[me], own);
  int64_t most = 0;
  for (size_t i = 0; i < size * size; ++i)
    if (i / size != i % size) most = std::max(most, counts[i]);
  const StepArea& area = s.staging;
  for (int64_t done = 0; done < most; done += area.part_bytes) {
    for (size_t r = 0; r < size; ++r) {
      s.piece[r] = r == me ? 0 : piece_bytes(counts[me * size + r], done, area.part_bytes);
      s.expected[r] = r == me ? 0 : piece_bytes(counts[r * size + me], done, area.part_bytes);
      s.offsets[r] = sent[r] + done;
    }
    FP4MOE_RETURN_IF_ERROR(s.step(operation, area, PairParts(from, s.offsets, s.piece, s.expected)));
    for (size_t r = 0; r < size; ++r)
      if (s.expected[r] > 0)
        copy(to + received[r] + done, s.part_from(area, static_cast<int>(r)), s.expected[r]);
  }
  return {};
}

// Sums the received parts and this rank's own part, `mine`, into out.
static void sum_parts(Communicator::State& s, const StepArea& area, const float* mine, int64_t num_elems,
                      float* out) {
  for (int r = 0; r < s.size; ++r)
    s.sources[static_cast<size_t>(r)] =
        r == s.me ? mine : reinterpret_cast<const float*>(s.part_from(area, r));
  sum_in_order(s.sources, num_elems, out);
}

// Runs one step of a reduce-scatter: part r of x is s.piece[r] bytes at byte s.offsets[r].
static Status reduce_step(Communicator::State& s, const Operation& operation, const float* x, float* out) {
  const int64_t num_bytes = s.piece[static_cast<size_t>(s.me)];
  FP4MOE_RETURN_IF_ERROR(
      s.step(operation, s.staging, PartToEach(bytes_of(x), s.offsets, s.piece, num_bytes)));
  const float* mine = x + s.offsets[static_cast<size_t>(s.me)] / kF32;
  if (num_bytes > 0) sum_parts(s, s.staging, mine, num_bytes / kF32, out);
  return {};
}

Status Communicator::reduce_scatter(const OpName& op, const float* x, std::span<const int64_t> counts,
                                    float* out) {
  State& s = *state_;
  check_counts(op.op, counts, s.size);
  const Operation operation =
      s.begin(op, OpKind::kReduceScatter, geometry_hash(counts), total_of(counts) * kF32);
  const int64_t most = *std::max_element(counts.begin(), counts.end()) * kF32;
  std::exclusive_scan(counts.begin(), counts.end(), s.starts.begin(), int64_t{0});
  const StepArea& area = s.staging;
  int64_t done = 0;
  do {
    for (size_t r = 0; r < counts.size(); ++r) {
      s.piece[r] = piece_bytes(counts[r] * kF32, done, area.part_bytes);
      s.offsets[r] = s.starts[r] * kF32 + std::min(done, counts[r] * kF32);
    }
    FP4MOE_RETURN_IF_ERROR(reduce_step(s, operation, x, out + done / kF32));
    done += area.part_bytes;
  } while (done < most);
  return {};
}

Status Communicator::all_reduce(const OpName& op, float* x, int64_t num_elems) {
  State& s = *state_;
  FP4MOE_CHECK(num_elems >= 0, std::string(op.op) + ": " + std::to_string(num_elems) + " elements");
  const int64_t num_bytes = num_elems * kF32;
  const Operation operation = s.begin(op, OpKind::kAllReduce, 0, num_bytes);
  if (s.size == 1) return {};
  const StepArea& area = s.staging;
  if (num_bytes <= std::min(area.part_bytes, kOneStepBytes)) {
    FP4MOE_RETURN_IF_ERROR(s.step(operation, area, EqualParts({x, num_bytes})));
    if (num_elems > 0) sum_parts(s, area, x, num_elems, x);
    return {};
  }
  // For each block: each rank sums its share of the block, then the shares are gathered.
  const int64_t block = s.size * area.part_bytes;
  for (int64_t done = 0; done < num_bytes; done += block) {
    const int64_t elems = std::min(block, num_bytes - done) / kF32;
    const int64_t share = (elems + s.size - 1) / s.size;
    for (int64_t r = 0; r < s.size; ++r) {
      s.piece[static_cast<size_t>(r)] = piece_bytes(elems, r * share, share) * kF32;
      s.offsets[static_cast<size_t>(r)] = done + std::min(elems, r * share) * kF32;
    }
    FP4MOE_RETURN_IF_ERROR(reduce_step(s, operation, x, x + s.offsets[static_cast<size_t>(s.me)] / kF32));
    FP4MOE_RETURN_IF_ERROR(gather_parts(s, operation, s.piece, s.offsets, reinterpret_cast<uint8_t*>(x)));
  }
  return {};
}

Status Communicator::broadcast(const OpName& op, int root, void* data, int64_t num_bytes) {
  State& s = *state_;
  FP4MOE_CHECK(root >= 0 && root < s.size && num_bytes >= 0,
               std::string(op.op) + ": " + std::to_string(num_bytes) + " bytes from root rank " +
                   std::to_string(root));
  const int64_t geometry[1] = {root};
  const Operation operation = s.begin(op, OpKind::kBroadcast, geometry_hash(geometry), num_bytes);
  std::fill(s.piece.begin(), s.piece.end(), 0);
  std::fill(s.starts.begin(), s.starts.end(), 0);
  s.piece[static_cast<size_t>(root)] = num_bytes;
  return gather_parts(s, operation, s.piece, s.starts, static_cast<uint8_t*>(data));
}

Status Communicator::barrier(const OpName& op) {
  State& s = *state_;
  const Operation operation = s.begin(op, OpKind::kBarrier, 0, 0);
  return s.step(operation, s.records, EqualParts({}));
}

}  // namespace fp4moe
