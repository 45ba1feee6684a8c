#include "engine/step/draft_choice.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numeric>
#include <random>

namespace fp4moe {
namespace {

// gpt-oss-120b: dense weights of 3.1 GB, 128 experts of 0.475 GB, 4 for a row.
constexpr StepCost kSparse{.dense_bytes = 3.1, .expert_bytes = 0.475, .num_experts = 128, .top_k = 4};

TEST(StepCost, ARowReadsItsExpertsOnce) {
  StepCost cost = kSparse;
  cost.row_share = 0;
  EXPECT_DOUBLE_EQ(cost.relative(1), 1);
  EXPECT_NEAR(cost.relative(2), (3.1 + 0.475 * (4 + 4 * 124.0 / 128)) / 5, 1e-9);
  EXPECT_NEAR(cost.relative(100000), (3.1 + 0.475 * 128) / 5, 1e-6);
  const StepCost dense{.dense_bytes = 2, .row_share = 0.25};
  EXPECT_DOUBLE_EQ(dense.relative(1), 1);
  EXPECT_DOUBLE_EQ(dense.relative(5), 2);
}

TEST(StepTimes, LearnEachNumberOfRows) {
  const auto truth = [](int64_t rows) { return 0.01 * std::pow(static_cast<double>(rows), 0.7); };
  StepTimes times(kSparse);
  EXPECT_EQ(times.seconds(1), 0);
  std::mt19937 random(1);
  std::uniform_real_distribution<double> noise(0.9, 1.1);
  for (int i = 0; i < 400; ++i) {
    const auto rows = static_cast<int64_t>(1 + random() % 9);
    times.add(rows, truth(rows) * noise(random) * (i % 50 == 7 ? 20 : 1));  // sometimes the machine is busy
  }
  for (int64_t rows = 1; rows <= 9; ++rows) EXPECT_NEAR(times.seconds(rows) / truth(rows), 1, 0.3) << rows;
}

// After a change that affects all steps, few measurements of one number of rows correct the others.
TEST(StepTimes, OfAllRowsFollowAChange) {
  StepTimes times(kSparse);
  const auto truth = [](int64_t rows) { return 1 + 0.5 * static_cast<double>(rows - 1); };
  for (int i = 0; i < 20; ++i)
    for (const int64_t rows : {1, 4}) times.add(rows, truth(rows));
  for (int i = 0; i < 60; ++i) times.add(1, 1.5 * truth(1));
  EXPECT_NEAR(times.seconds(1), 1.5 * truth(1), 0.1);
  EXPECT_GT(times.seconds(4), 1.3 * truth(4));
  EXPECT_LT(times.seconds(4), 1.6 * truth(4));
}

TEST(DraftRecord, CountsByPosition) {
  DraftRecord record;
  EXPECT_EQ(record.rate(0, 0.3, 1), 0.3);
  record.add(3, 1, 1);  // right, wrong, not reached
  EXPECT_EQ(record.rate(0, 0, 1), 0.5);
  EXPECT_EQ(record.rate(1, 1, 1), 0.5);
  EXPECT_EQ(record.rate(2, 0.25, 1), 0.25);
  record.add(2, 2, 0.5);
  EXPECT_EQ(record.rate(0, 0, 0.5), 1.5 / 2);
  EXPECT_EQ(record.rate(1, 0, 0.5), 1.0 / 2);
  EXPECT_EQ(record.reach(), 4);
  record.add(4, 4, 1);
  record.add(8, 3, 1);
  EXPECT_EQ(record.reach(), 8);
}

// ---- simulations ----------------------------------------------------------------------------------

// Sequences that decode `num_tokens` tokens each with drafts that are right with the probability that
// `rate` returns, on a machine where a step of `rows` rows takes seconds(rows).
struct Simulation {
  int num_sequences = 1;
  int64_t num_tokens = 256;
  int64_t max_drafts = 3;
  std::function<double(int sequence, int64_t token, int64_t position)> rate;
  std::function<double(double rows)> seconds;
  double draft_seconds = 0;  // for each position
  double noise = 0.05;
  double hiccups = 0;  // share of the steps that take 2 to 10 times as long
  StepCost prior = kSparse;
};

struct Outcome {
  double speed_up = 0;                 // over steps without drafts
  std::vector<double> accept_lengths;  // of each sequence, over its last half
};

Outcome run(const Simulation& simulation, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(0, 1);
  const auto n = static_cast<size_t>(simulation.num_sequences);
  DraftChoice choice(simulation.prior);
  std::vector<DraftRecord> records(n);
  std::vector<int64_t> tokens(n), late_tokens(n), late_steps(n);
  double time = 0, plain_time = 0;
  for (;;) {
    std::vector<size_t> alive;
    std::vector<DraftChoice::Candidate> candidates;
    for (size_t s = 0; s < n; ++s)
      if (tokens[s] < simulation.num_tokens) {
        alive.push_back(s);
        candidates.push_back({&records[s], simulation.max_drafts});
      }
    if (alive.empty()) break;
    choice.choose(candidates, std::ssize(alive), simulation.draft_seconds);
    int64_t num_rows = std::ssize(alive), depth = 0;
    for (const auto& candidate : candidates) {
      EXPECT_GE(candidate.num_drafts, 0);
      EXPECT_LE(candidate.num_drafts, simulation.max_drafts);
      num_rows += candidate.num_drafts;
      depth = std::max(depth, candidate.num_drafts);
    }
    const double seconds = simulation.seconds(static_cast<double>(num_rows));
    time += seconds + simulation.draft_seconds * static_cast<double>(depth);
    const double noise = uniform(random) < simulation.hiccups ? 1 + 8 * uniform(random)
                                                              : simulation.noise * (2 * uniform(random) - 1);
    choice.add_step(std::ssize(alive), num_rows, seconds * (1 + noise));
    for (size_t i = 0; i < alive.size(); ++i) {
      const size_t s = alive[i];
      int64_t num_right = 0;
      while (num_right < candidates[i].num_drafts &&
             uniform(random) < simulation.rate(static_cast<int>(s), tokens[s], num_right))
        ++num_right;
      choice.add_verified(records[s], candidates[i].num_drafts, num_right);
      if (2 * tokens[s] >= simulation.num_tokens) {
        late_tokens[s] += num_right + 1;
        ++late_steps[s];
      }
      tokens[s] += num_right + 1;
    }
  }
  plain_time = static_cast<double>(simulation.num_tokens) *
               simulation.seconds(static_cast<double>(simulation.num_sequences));
  Outcome outcome{.speed_up = plain_time / time, .accept_lengths = {}};
  for (size_t s = 0; s < n; ++s)
    outcome.accept_lengths.push_back(static_cast<double>(late_tokens[s]) /
                                     static_cast<double>(std::max<int64_t>(late_steps[s], 1)));
  return outcome;
}

// Machines: a row costs as much as a step, much, little, nothing; an MoE limited by memory.
const std::vector<std::function<double(double)>> kMachines = {
    [](double rows) { return rows; },
    [](double rows) { return 1 + 0.5 * rows; },
    [](double rows) { return 1 + 0.1 * rows; },
    [](double) { return 1.0; },
    [](double rows) { return kSparse.relative(rows); },
};

TEST(DraftChoice, RandomDraftsCostLittle) {
  for (size_t machine = 0; machine < kMachines.size(); ++machine)
    for (const int num_sequences : {1, 4, 16})
      for (const int64_t max_drafts : {1, 3, 7, 63})
        for (uint32_t seed = 0; seed < 10; ++seed) {
          const Outcome outcome = run({.num_sequences = num_sequences,
                                       .max_drafts = max_drafts,
                                       .rate = [](int, int64_t, int64_t) { return 1e-3; },
                                       .seconds = kMachines[machine],
                                       .hiccups = seed % 2 == 0 ? 0.0 : 0.1},
                                      seed);
          EXPECT_GE(outcome.speed_up, 0.975) << "machine " << machine << ", " << num_sequences
                                             << " sequences, " << max_drafts << " drafts, seed " << seed;
        }
}

TEST(DraftChoice, RightDraftsAreAllKept) {
  for (size_t machine = 1; machine < kMachines.size(); ++machine)
    for (const int num_sequences : {1, 16})
      for (const int64_t max_drafts : {1, 3, 7, 15}) {
        if (machine == 1 && num_sequences > 1) continue;  // they would gain 11 % at most
        const Outcome outcome = run({.num_sequences = num_sequences,
                                     .num_tokens = 1024,
                                     .max_drafts = max_drafts,
                                     .rate = [](int, int64_t, int64_t) { return 1.0; },
                                     .seconds = kMachines[machine],
                                     .hiccups = max_drafts == 3 ? 0.1 : 0.0},
                                    1);
        const auto& lengths = outcome.accept_lengths;
        const double mean = std::accumulate(lengths.begin(), lengths.end(), 0.0) / num_sequences;
        EXPECT_GT(mean, (max_drafts == 3 ? 0.8 : 0.87) * static_cast<double>(max_drafts + 1))
            << "machine " << machine << ", " << num_sequences << " sequences, " << max_drafts << " drafts";
      }
}

// For each rate, the speed-up is nearly that of the best fixed number of drafts.
TEST(DraftChoice, IsNearlyTheBestFixedNumber) {
  for (size_t machine = 0; machine < kMachines.size(); ++machine)
    for (const double rate : {0.1, 0.3, 0.5, 0.7, 0.9})
      for (const double draft_seconds : {0.0, 0.1}) {
        const auto& seconds = kMachines[machine];
        double best = 1;
        for (int drafts = 1; drafts <= 7; ++drafts) {
          const double tokens = (1 - std::pow(rate, drafts + 1)) / (1 - rate);
          best = std::max(best, tokens * seconds(1) / (seconds(1 + drafts) + draft_seconds * drafts));
        }
        double sum = 0;
        constexpr int kSeeds = 4;
        for (uint32_t seed = 0; seed < kSeeds; ++seed)
          sum += run({.num_tokens = 2000,
                      .max_drafts = 7,
                      .rate = [&](int, int64_t, int64_t) { return rate; },
                      .seconds = seconds,
                      .draft_seconds = draft_seconds},
                     seed)
                     .speed_up;
        EXPECT_GT(sum / kSeeds, 0.9 * best) << "machine " << machine << ", rate " << rate << ", draft "
                                            << draft_seconds << " s, best " << best;
      }
}

// One of four sequences has right drafts: it alone drafts.
TEST(DraftChoice, IsMadeForEachSequence) {
  const Outcome outcome =
      run({.num_sequences = 4,
           .num_tokens = 512,
           .rate = [](int sequence, int64_t, int64_t) { return sequence == 2 ? 1.0 : 0.01; },
           .seconds = kMachines[1]},
          3);
  EXPECT_GT(outcome.accept_lengths[2], 3.5);
  for (const size_t s : {0, 1, 3}) EXPECT_LT(outcome.accept_lengths[s], 1.2);
}

// Drafts of a sequence that become right are used soon, because it is probed.
TEST(DraftChoice, ProbesFindDraftsThatBeginToPay) {
  for (size_t machine = 1; machine < kMachines.size(); ++machine) {
    const Outcome outcome = run({.num_tokens = 2048,
                                 .rate = [](int, int64_t token, int64_t) { return token < 700 ? 0.0 : 1.0; },
                                 .seconds = kMachines[machine]},
                                2);
    EXPECT_GT(outcome.accept_lengths[0], 3.5) << "machine " << machine;
  }
}

TEST(DraftChoice, WithoutMeasuredStepsNothingIsDrafted) {
  DraftChoice choice(kSparse);
  DraftRecord record;
  std::vector<DraftChoice::Candidate> one{{&record, 3}};
  choice.choose(one, 1);
  EXPECT_EQ(one[0].num_drafts, 0);
  choice.choose({}, 0);
}

}  // namespace
}  // namespace fp4moe
