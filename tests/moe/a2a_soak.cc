// a2a_soak MINUTES [SEED]: dispatch and combine with random protocols, ranks, groups, tokens, K, skew,
// payloads, budgets, stalls, jitter and yields on thread ranks, each bit for bit against plain loops over
// tokens and slots. A line a minute; exit code 1 with the seed of the case at the first difference.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "moe/a2a_case.h"

namespace fp4moe::test {
namespace {

using Clock = std::chrono::steady_clock;

class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  bool one_in(int64_t n) { return below(n) == 0; }
  template <class T>
  T of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int64_t>(values.size()))];
  }

 private:
  std::mt19937_64 random_;
};

// A job: ranks, groups, and how its ranks misbehave in time.
A2aWorld::Options draw_world(Draw& draw) {
  A2aWorld::Options o;
  o.ranks = draw.of({1, 2, 3, 4, 8});
  o.dp = draw.one_in(3) ? 1 : o.ranks;
  if (o.ranks >= 4 && draw.one_in(4)) o.dp = o.ranks / 2;
  if (o.ranks == 3 && o.dp == 1 && draw.one_in(2)) o.dp = 3;
  o.heap_bytes = 1 << 20;
  o.record_bytes = 128 << 10;
  o.timeout_seconds = 60;
  o.first_signal = draw.one_in(4) ? 0u - static_cast<uint32_t>(1 + draw.below(200)) : 0u;
  const bool slow = draw.one_in(2);
  for (int r = 0; r < o.ranks && slow; ++r) {
    Faults f;
    f.seed = static_cast<uint64_t>(draw.below(1 << 30));
    f.jitter = std::chrono::microseconds(draw.one_in(2) ? draw.below(200) : 0);
    f.yield_probability = draw.of({0.0, 0.05, 0.5});
    if (draw.one_in(3)) {
      f.stall = std::chrono::microseconds(draw.below(20000));
      f.stall_at = draw.below(2000);
    }
    o.faults.push_back(f);
  }
  return o;
}

A2aCase draw_case(const A2aWorld::Options& world, Draw& draw) {
  A2aCase c;
  c.protocol = draw.of({"deepep", "deepep", "flashinfer", "flashinfer", "none"});
  c.layout = {world.ranks, world.ranks, world.dp, 0};
  if (c.protocol == "none" && draw.one_in(2)) c.layout.ep = 1;
  c.E = world.ranks * (1 + draw.below(6));
  c.K = 1 + draw.below(std::min<int64_t>(c.E, 8));
  c.H = 16 * (1 + draw.below(12));
  c.dtype = draw.one_in(4) ? DType::kF32 : DType::kBF16;
  c.payload = draw.of({Payload::kAct, Payload::kFp8, Payload::kNvfp4});
  c.combine = draw.one_in(4) ? CombinePayload::kFp8 : CombinePayload::kAct;
  c.per_token = draw.one_in(2);
  c.deterministic = draw.one_in(4);
  c.checksum = draw.one_in(2);
  c.max_group_rows = 96;
  c.layer = static_cast<int>(draw.below(60));
  TokenOptions tokens;
  tokens.seed = static_cast<uint64_t>(draw.below(int64_t{1} << 40));
  for (int g = 0; g < world.dp; ++g)
    tokens.tokens.push_back(draw.one_in(4) ? 0 : draw.one_in(3) ? draw.below(97) : draw.below(12));
  tokens.dropped = draw.of({0.0, 0.1, 0.9});
  tokens.hot = draw.of({0.0, 0.0, 0.5, 1.0});
  fill_tokens(c, tokens);
  c.budget = draw.of<int64_t>({48 << 10, 128 << 10, 1 << 20});
  while (!a2a_bytes(c.protocol.c_str(), c.options(0)).ok()) c.budget *= 2;
  return c;
}

// Whether all ranks have the expected bits; says what differs.
bool matches(const A2aCase& c, const std::vector<RankOutcome>& outcomes) {
  const auto expected = expected_output(c);
  for (size_t r = 0; r < outcomes.size(); ++r) {
    if (!outcomes[r].status.ok()) {
      std::printf("rank %zu: %s\n", r, outcomes[r].status.to_string().c_str());
      return false;
    }
    const auto& e = expected[r / static_cast<size_t>(c.layout.attention_tp())];
    if (outcomes[r].out.size() == e.size() &&
        std::memcmp(outcomes[r].out.data(), e.data(), e.size() * sizeof(float)) == 0)
      continue;
    std::printf("rank %zu of %d: %s differs from the plain loops\n", r, c.layout.tp, c.protocol.c_str());
    return false;
  }
  return true;
}

struct Totals {
  int64_t cases = 0, exchanges = 0, rounds = 0, tokens = 0;
};

// Some cases over one job.
bool soak_world(uint64_t seed, Clock::time_point end, Totals& totals) {
  Draw draw(seed);
  const A2aWorld::Options options = draw_world(draw);
  A2aWorld world(options);
  for (int i = 0; i < 40 && Clock::now() < end; ++i) {
    const A2aCase c = draw_case(options, draw);
    const int repeats = draw.one_in(4) ? 8 : 1;
    const auto outcomes = world.run(c, repeats);
    if (!matches(c, outcomes)) {
      std::printf("case %d of seed %llu\n", i, static_cast<unsigned long long>(seed));
      return false;
    }
    ++totals.cases;
    totals.exchanges += repeats;
    totals.rounds += repeats * outcomes[0].rounds;
    for (const GroupTokens& g : c.groups) totals.tokens += repeats * g.T;
  }
  return true;
}

int soak(double minutes, uint64_t seed) {
  const auto start = Clock::now();
  const auto end =
      start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(minutes * 60));
  Totals totals;
  const auto print = [&](const char* what) {
    std::printf("%s %.1f min: %lld cases, %lld exchanges, %lld rounds, %lld tokens, all equal bit for bit\n",
                what, std::chrono::duration<double>(Clock::now() - start).count() / 60,
                static_cast<long long>(totals.cases), static_cast<long long>(totals.exchanges),
                static_cast<long long>(totals.rounds), static_cast<long long>(totals.tokens));
    std::fflush(stdout);
  };
  auto next_line = start + std::chrono::minutes(1);
  for (; Clock::now() < end; ++seed) {
    if (!soak_world(seed, end, totals)) return 1;
    if (Clock::now() < next_line) continue;
    print("after");
    next_line += std::chrono::minutes(1);
  }
  print("done after");
  return totals.cases > 0 ? 0 : 1;
}

}  // namespace
}  // namespace fp4moe::test

int main(int argc, char** argv) {
  const double minutes = argc > 1 ? std::atof(argv[1]) : 0;
  if (minutes <= 0) {
    std::puts("usage: a2a_soak MINUTES [SEED]");
    return 2;
  }
  return fp4moe::test::soak(minutes, argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
}
