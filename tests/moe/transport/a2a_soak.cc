// a2a_soak MINUTES [SEED]: runs dispatch and combine with random protocols, ranks, groups, tokens, K, skew,
// payloads, budgets, stalls, jitter and yields on thread ranks, and compares each result with plain loops
// over tokens and slots, bit for bit. Prints a line per minute. At the first difference, prints the case's
// seed and exits with 1.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "moe/a2a_case.h"

namespace fp4moe::test {
namespace {

using Clock = std::chrono::steady_clock;

// Draws a job: ranks, groups, and the ranks' delays.
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

struct Totals {
  int64_t cases = 0, exchanges = 0, rounds = 0, tokens = 0;
};

// Runs several cases over one job.
bool soak_world(uint64_t seed, Clock::time_point end, Totals& totals) {
  Draw draw(seed);
  const A2aWorld::Options options = draw_world(draw);
  A2aWorld world(options);
  for (int i = 0; i < 40 && Clock::now() < end; ++i) {
    const A2aCase c = random_case(options.ranks, options.dp, draw);
    const int repeats = draw.one_in(4) ? 8 : 1;
    const auto outcomes = world.run(c, repeats);
    if (const std::string wrong = difference(c, outcomes); !wrong.empty()) {
      std::puts(wrong.c_str());
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
