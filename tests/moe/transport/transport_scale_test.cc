// transport_scale_test RANKS TOKENS HIDDEN TOP_K EXPERTS BUDGET_MIB: runs dispatch and combine without
// experts. Rows are generated on the fly and checked by hash on arrival and again after they are summed.
// Memory use is compared with the budget and with the prediction of a2a_bytes(). TOKENS are per rank; each
// rank is a separate group.
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "base/hash.h"
#include "comm/job.h"
#include "formats/bf16.h"
#include "moe/transport/a2a.h"

namespace fp4moe {
namespace {

struct Scale {
  int ranks;
  int64_t tokens, hidden, top_k, experts, budget;
};

uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Returns values of four significant bits, so that an eighth of them times 1..8 is exact in bf16.
std::vector<bf16> make_values() {
  std::vector<bf16> values;
  for (int byte = 0; byte < 256; ++byte)
    values.push_back(
        float_to_bf16(static_cast<float>((byte & 1 ? -1 : 1) * (8 + (byte >> 1 & 7)) * (1 << (byte >> 6)))));
  return values;
}

// The tokens of all ranks: a row starts with its number in digits of four bits, so that a receiver can
// identify it.
class Tokens {
 public:
  explicit Tokens(const Scale& scale)
      : scale_(scale), values_(make_values()), hashes_(static_cast<size_t>(scale.ranks * scale.tokens)) {}

  void make(int rank, int64_t token, bf16* x) {
    uint64_t state = key(rank, token);
    for (int64_t h = 0; h < scale_.hidden; h += 8) {
      state = mix(state + 0x9e3779b97f4a7c15u);
      for (int i = 0; i < 8; ++i) x[h + i] = values_[state >> (8 * i) & 0xff];
    }
    for (int digit = 0; digit < kDigits; ++digit)
      x[digit] = float_to_bf16(static_cast<float>(key(rank, token) >> (4 * digit) & 0xf));
    hashes_[key(rank, token)] = hash(x);
  }
  // Returns the row number that x's first elements encode; -1 if it is invalid or the row's hash differs.
  int64_t identify(const bf16* x) const {
    uint64_t k = 0;
    for (int digit = 0; digit < kDigits; ++digit) {
      const float value = bf16_to_float(x[digit]);
      if (!(value >= 0 && value < 16)) return -1;
      k |= static_cast<uint64_t>(value) << (4 * digit);
    }
    return k < hashes_.size() && hash(x) == hashes_[k] ? static_cast<int64_t>(k) : -1;
  }
  bool is(int rank, int64_t token, const bf16* x) const { return hash(x) == hashes_[key(rank, token)]; }
  // Gives distinct experts for each k: the stride is odd, and the number of experts is a power of two.
  int32_t id(size_t key, int64_t k) const {
    const uint64_t random = mix(key * 2 + 1);
    return static_cast<int32_t>((random + static_cast<uint64_t>(k) * (random >> 32 | 1)) %
                                static_cast<uint64_t>(scale_.experts));
  }
  bool goes_to(size_t key, int64_t expert) const {
    for (int64_t k = 0; k < scale_.top_k; ++k)
      if (id(key, k) == expert) return true;
    return false;
  }
  size_t key(int rank, int64_t token) const { return static_cast<size_t>(rank * scale_.tokens + token); }

 private:
  static constexpr int kDigits = 8;  // of four bits each
  uint64_t hash(const bf16* x) const { return hash64(x, scale_.hidden * 2); }
  const Scale scale_;
  const std::vector<bf16> values_;
  std::vector<uint64_t> hashes_;
};

struct Outcome {
  std::atomic<int64_t> rows{0}, bad_rows{0}, sums{0}, bad_sums{0}, rounds{0}, scratch_used{0};
  std::atomic<bool> failed{false};
};

// Runs one rank's exchange.
class RankRun {
 public:
  RankRun(const Scale& scale, Tokens& tokens, int rank, Outcome& outcome)
      : scale_(scale),
        tokens_(tokens),
        rank_(rank),
        outcome_(outcome),
        row_(static_cast<size_t>(scale.hidden)) {}

  Status run(Transport& transport, Arena& scratch) {
    TransportInput input;
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < scale_.tokens; ++t)
      for (int64_t k = 0; k < scale_.top_k; ++k) ids.push_back(tokens_.id(tokens_.key(rank_, t), k));
    const std::vector<float> weights(ids.size(), 1.0f / static_cast<float>(scale_.top_k));
    input.group_rows = scale_.tokens;
    input.x = {nullptr, DType::kBF16, scale_.tokens, scale_.hidden};
    input.ids = ids.data();
    input.weights = weights.data();
    input.make_row = [this](int64_t t, void* x) { tokens_.make(rank_, t, static_cast<bf16*>(x)); };
    input.take_row = [this](int64_t t, const float* sum) { take(t, sum); };
    ThreadPool pool(1);
    if (Status s = transport.begin(input, scratch, pool); !s.ok()) return s;
    const int64_t used = scratch.used_bytes();
    int64_t most = used;
    for (ExpertBatch batch;;) {
      const Result<bool> more = transport.next(batch, scratch, pool);
      if (!more.ok()) return more.status();
      if (!*more) break;
      if (rank_ == 0) ++outcome_.rounds;
      return_rows(batch);
      if (Status s = transport.combine(batch, scratch, pool); !s.ok()) return s;
      most = std::max(most, scratch.used_bytes());
      scratch.rewind(used);
    }
    outcome_.scratch_used += most;
    return transport.finish(nullptr, pool);
  }

 private:
  // Checks that each expert received only its rows, and returns the rows unchanged.
  void return_rows(const ExpertBatch& batch) {
    for (int64_t e = 0; e < batch.num_experts; ++e)
      for (int64_t r = batch.first_row(e); r < batch.first_row(e) + batch.num_rows(e); ++r) {
        const bf16* x = static_cast<const bf16*>(batch.x.data) + r * scale_.hidden;
        const int64_t key = tokens_.identify(x);
        ++outcome_.rows;
        if (key < 0 || !tokens_.goes_to(static_cast<size_t>(key), rank_ * batch.num_experts + e))
          ++outcome_.bad_rows;
        float* y = batch.y + r * scale_.hidden;
        for (int64_t h = 0; h < scale_.hidden; ++h) y[h] = bf16_to_float(x[h]);
      }
  }
  // Checks the sum over the K experts, each with weight 1 / K, which must equal the row.
  void take(int64_t token, const float* sum) {
    bool exact = true;
    for (int64_t h = 0; h < scale_.hidden; ++h) {
      row_[static_cast<size_t>(h)] = float_to_bf16(sum[h]);
      exact &= bf16_to_float(row_[static_cast<size_t>(h)]) == sum[h];
    }
    ++outcome_.sums;
    if (!exact || !tokens_.is(rank_, token, row_.data())) ++outcome_.bad_sums;
  }

  const Scale scale_;
  Tokens& tokens_;
  const int rank_;
  Outcome& outcome_;
  std::vector<bf16> row_;
};

double mib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

int64_t peak_rss() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024;
}

TransportOptions options_for(const Scale& s, int rank, int64_t region_offset) {
  TransportOptions o;
  o.problem.hidden_size = s.hidden;
  o.problem.intermediate_size = 2048;
  o.problem.num_experts = s.experts;
  o.problem.top_k = s.top_k;
  o.problem.layout = {s.ranks, s.ranks, s.ranks, rank};
  o.memory_budget = s.budget;
  o.max_group_rows = s.tokens;
  o.region_offset = region_offset;
  return o;
}

// The state that all ranks of one run share.
struct ScaleRun {
  const Scale& scale;
  const char* protocol;
  Job& job;
  const A2aBytes& bytes;
  Tokens& tokens;
  Outcome& outcome;
};

void run_rank(const ScaleRun& run, int rank) {
  const Scale& s = run.scale;
  const A2aBytes& bytes = run.bytes;
  const int64_t records = Communicator::heap_bytes(s.ranks, bytes.record, 0);
  CommOptions comm;
  comm.timeout = std::chrono::minutes(5);
  Communicator world(run.job.endpoint(rank), 0, s.ranks, {0, bytes.record, 0, 8}, comm);
  const auto make = std::strcmp(run.protocol, "deepep") == 0 ? make_deepep : make_flashinfer;
  auto transport = make(options_for(s, rank, Arena::padded(records)), &world, nullptr);
  auto scratch = Arena::make(bytes.scratch - bytes.sums);
  Status status = !transport.ok() ? transport.status()
                  : !scratch.ok() ? scratch.status()
                                  : RankRun(s, run.tokens, rank, run.outcome).run(**transport, *scratch);
  if (status.ok()) return;
  run.outcome.failed = true;
  std::printf("rank %d: %s\n", rank, status.to_string().c_str());
  run.job.endpoint(rank).fail(status);
}

bool run(const Scale& s, const char* protocol) {
  const auto bytes = a2a_bytes(protocol, options_for(s, 0, 0));
  if (!bytes.ok()) {
    std::printf("%s\n", bytes.status().to_string().c_str());
    return false;
  }
  const int64_t records = Arena::padded(Communicator::heap_bytes(s.ranks, bytes->record, 0));
  JobOptions options;
  options.fabric = "threads";
  options.num_ranks = s.ranks;
  options.heap_bytes = records + bytes->heap;
  auto job = Job::open(options);
  if (!job.ok()) {
    std::printf("%s\n", job.status().to_string().c_str());
    return false;
  }
  Tokens tokens(s);
  Outcome outcome;
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int r = 0; r < s.ranks; ++r)
    threads.emplace_back([&, r] { run_rank({s, protocol, **job, *bytes, tokens, outcome}, r); });
  for (std::thread& thread : threads) thread.join();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  const int64_t heaps = s.ranks * (*job)->endpoint(0).heap_bytes();
  const int64_t predicted = s.ranks * (records + bytes->heap);
  const int64_t scratch = s.ranks * (bytes->scratch - bytes->sums);
  std::printf(
      "%s: %d ranks x %lld tokens x %lld bf16, K=%lld, E=%lld, %.0f MiB per rank: %.1f s, %lld rounds\n",
      protocol, s.ranks, static_cast<long long>(s.tokens), static_cast<long long>(s.hidden),
      static_cast<long long>(s.top_k), static_cast<long long>(s.experts), mib(s.budget), seconds,
      static_cast<long long>(outcome.rounds));
  std::printf("  rows %lld (bad %lld), sums %lld (bad %lld)\n", static_cast<long long>(outcome.rows),
              static_cast<long long>(outcome.bad_rows), static_cast<long long>(outcome.sums),
              static_cast<long long>(outcome.bad_sums));
  std::printf(
      "  a2a arenas %.1f MiB, predicted %.1f, budget %.1f; scratch used %.1f MiB, predicted %.1f; peak RSS "
      "%.1f MiB\n",
      mib(heaps), mib(predicted), mib(s.ranks * s.budget), mib(outcome.scratch_used), mib(scratch),
      mib(peak_rss()));
  const auto within = [](int64_t a, int64_t b) { return std::abs(a - b) * 100 <= b; };
  return !outcome.failed && outcome.bad_rows == 0 && outcome.bad_sums == 0 &&
         outcome.sums == s.ranks * s.tokens && heaps <= s.ranks * s.budget && within(heaps, predicted) &&
         outcome.scratch_used <= scratch && peak_rss() < (int64_t{6} << 30);
}

}  // namespace
}  // namespace fp4moe

int main(int argc, char** argv) {
  if (argc != 7) {
    std::puts("usage: transport_scale_test RANKS TOKENS HIDDEN TOP_K EXPERTS BUDGET_MIB");
    return 2;
  }
  const auto number = [&](int i) { return std::atoll(argv[i]); };
  const fp4moe::Scale scale{
      static_cast<int>(number(1)), number(2), number(3), number(4), number(5), number(6) << 20};
  bool ok = true;
  for (const char* protocol : {"deepep", "flashinfer"}) ok &= fp4moe::run(scale, protocol);
  return ok ? 0 : 1;
}
