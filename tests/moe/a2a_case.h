// A layer's exchange as a test case: random tokens for every group, experts that are simple functions, the
// expected result from plain loops over tokens and slots (independent of plans and placement), and ranks that
// run the transport under test.
#pragma once

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "comm/faulty_endpoint.h"
#include "comm/job.h"
#include "moe/transport/a2a.h"

namespace fp4moe::test {

// One group's batch. x holds values that the activation type represents exactly.
struct GroupTokens {
  int64_t T = 0;
  std::vector<float> x;        // [T, H]
  std::vector<int32_t> ids;    // [T, K]
  std::vector<float> weights;  // [T, K]
  std::vector<float> addend;   // [T, H]: the shared expert's output
};

struct A2aCase {
  std::string protocol = "deepep";
  RankLayout layout;  // options() sets its rank
  int64_t E = 8, K = 2, H = 64;
  DType dtype = DType::kBF16;
  Payload payload = Payload::kAct;
  CombinePayload combine = CombinePayload::kAct;
  bool per_token = false, deterministic = false, checksum = false;
  float nvfp4_scale = 2688.0f / 6.0f;
  int64_t budget = 1 << 20;
  int64_t max_group_rows = 64;
  int layer = 3;
  std::vector<GroupTokens> groups;  // [dp]

  TransportOptions options(int rank) const;
};

// How fill_tokens() fills a case.
struct TokenOptions {
  uint64_t seed = 1;
  std::vector<int64_t> tokens;  // per group
  double dropped = 0.1;         // share of the slots whose id is not an expert
  double hot = 0;               // share of the slots that go to expert E / 2
};
void fill_tokens(A2aCase& c, const TokenOptions& options);

// Random choices, reproducible for a seed.
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

// Returns a case with a random protocol, payload, skew and budget for these ranks.
A2aCase random_case(int ranks, int dp, Draw& draw);

// Returns y = f(expert, x) for element h. If experts are split (ep = 1), returns the rank's part of it.
float expert_value(const A2aCase& c, int64_t expert, float x, int64_t h, int rank);

// Returns the layer's expected output for each group [T, H], with the roundings that the protocol specifies.
std::vector<std::vector<float>> expected_output(const A2aCase& c);

struct RankOutcome {
  bool here = false;  // the rank belongs to this process
  Status status;
  std::vector<float> out;  // [T of the group, H]
  int64_t rounds = 0, arena_used = 0, arena_promised = 0, batch_rows = 0, expected_m = 0;
};

// Describes the differences from expected_output(c) on this process's ranks; empty if there are none.
std::string difference(const A2aCase& c, const std::vector<RankOutcome>& outcomes);

// This process's ranks, each in a thread, with one job and its communicators, for any number of cases with
// the same dp.
class A2aWorld {
 public:
  struct Options {
    int ranks = 1, dp = 1;
    std::string fabric = "threads";
    int64_t heap_bytes = 2 << 20;     // for transports
    int64_t record_bytes = 64 << 10;  // for exchanges
    double timeout_seconds = 10;
    uint32_t first_signal = 0;
    std::vector<Faults> faults;  // [ranks] or empty
  };
  explicit A2aWorld(const Options& options);
  ~A2aWorld();

  // Runs the case on every rank of this process `repeats` times and returns the last outcomes. If `edit` is
  // given, it first changes each rank's copy of the case.
  using Edit = std::function<void(int rank, A2aCase&)>;
  std::vector<RankOutcome> run(const A2aCase& c, int repeats = 1, const Edit& edit = nullptr);
  Endpoint& endpoint(int rank);

 private:
  struct Rank;
  void run_rank(int rank, const A2aCase& c, int repeats, RankOutcome& outcome);
  Options options_;
  std::unique_ptr<Job> job_;
  std::vector<std::unique_ptr<Rank>> ranks_;  // null for ranks of other processes
};

}  // namespace fp4moe::test
