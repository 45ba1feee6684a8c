// A fault between ranks ends in the same error on every rank; the error names both ranks and both values.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <vector>

#include "base/log.h"
#include "comm/communicator.h"
#include "comm/faulty_endpoint.h"
#include "comm/rank_threads.h"

namespace fp4moe {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;
using test::Faults;
using test::FaultyEndpoint;
using test::on_every_rank;
using test::threads_job;

constexpr int kRanks = 4;
constexpr CommRegion kRegion = {.record_bytes = 64, .staging_bytes = 4096};

struct Outcome {
  std::vector<Status> statuses;
  std::chrono::nanoseconds took{0};
};

// Runs body(comm) on every rank; only rank `faulty` has faults.
template <class Body>
Outcome run(int faulty, const Faults& faults, const CommOptions& options, const Body& body) {
  const auto job =
      threads_job(kRanks, Communicator::heap_bytes(kRanks, kRegion.record_bytes, kRegion.staging_bytes));
  Outcome outcome;
  outcome.statuses.resize(kRanks);
  const auto begin = steady_clock::now();
  on_every_rank(kRanks, [&](int rank) {
    FaultyEndpoint endpoint(job->endpoint(rank), rank == faulty ? faults : Faults{});
    Communicator comm(endpoint, 0, kRanks, kRegion, options);
    outcome.statuses[static_cast<size_t>(rank)] = body(comm);
  });
  outcome.took = steady_clock::now() - begin;
  return outcome;
}

// Runs ten layers, each an exchange and an all_reduce of two pieces.
Status ten_layers(Communicator& comm) {
  for (int layer = 0; layer < 10; ++layer) {
    int32_t all[kRanks], mine = comm.rank();
    Status status = comm.exchange({"counts", layer}, &mine, 4, all);
    std::vector<float> x(3000, 1.0f);
    if (status.ok()) status = comm.all_reduce({"attention", layer}, x.data(), 3000);
    if (!status.ok()) return status;
    if (std::any_of(x.begin(), x.end(), [](float v) { return v != kRanks; })) return data_loss("wrong sum");
    for (int r = 0; r < kRanks; ++r)
      if (all[r] != r) return data_loss("wrong record");
  }
  return {};
}

void expect_all_ok(const Outcome& outcome) {
  for (const Status& status : outcome.statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

// Checks that every rank has the same error and that it contains all `words`.
void expect_all(const Outcome& outcome, StatusCode code, std::initializer_list<const char*> words) {
  for (int rank = 0; rank < kRanks; ++rank) {
    const Status& status = outcome.statuses[static_cast<size_t>(rank)];
    EXPECT_EQ(status.code(), code) << "rank " << rank << ": " << status.to_string();
    EXPECT_EQ(status.message(), outcome.statuses[0].message());
    for (const char* word : words)
      EXPECT_NE(status.message().find(word), std::string::npos) << word << " in " << status.message();
  }
}

TEST(CommunicatorFaults, AStallOfHalfTheDeadlineIsNoError) {  // F2
  Faults faults;
  faults.stall_at = 20;
  faults.stall = 500ms;
  expect_all_ok(run(2, faults, {.timeout = 1s}, ten_layers));
}

TEST(CommunicatorFaults, AStallOfTwiceTheDeadlineNamesEverything) {
  Faults faults;
  faults.stall_at = 20;
  faults.stall = 1200ms;
  const Outcome outcome = run(2, faults, {.timeout = 600ms}, ten_layers);
  expect_all(outcome, StatusCode::kDeadline,
             {"rank ", "waited 0.6 s for rank 2 in ", ", layer ", ", epoch ", "expected signal ", ", seen "});
  EXPECT_LT(outcome.took, 600ms + 1s);
}

TEST(CommunicatorFaults, ADeadRankEndsTheJobWithinTheDeadlineAndASecond) {  // F1
  for (const int64_t action : {0, 7, 30, 61}) {
    Faults faults;
    faults.dead_from = action;
    const Outcome outcome = run(1, faults, {.timeout = 300ms}, ten_layers);
    expect_all(outcome, StatusCode::kDeadline, {"waited 0.3 s for rank 1", "layer", "epoch"});
    EXPECT_LT(outcome.took, 300ms + 1s);
  }
}

// Cells only grow, so the signal of the next step replaces a lost one, and the data of both steps is still in
// place.
TEST(CommunicatorFaults, ALostSignalIsMadeGoodByTheNext) {
  for (const int64_t number : {0, 5, 11, 29}) {
    Faults faults;
    faults.drop_signal = number;
    expect_all_ok(run(3, faults, {.timeout = 5s}, ten_layers));
  }
}

TEST(CommunicatorFaults, TheLastSignalLostIsADeadline) {
  Faults faults;
  faults.drop_signal = 5 * (kRanks - 1) - 1;  // rank 3 sends to 0, 1, 2 in each of five barriers
  const Outcome outcome = run(3, faults, {.timeout = 300ms}, [](Communicator& comm) -> Status {
    for (int i = 0; i < 4; ++i)
      if (const Status status = comm.barrier({"barrier"}); !status.ok()) return status;
    return comm.barrier({"last"});
  });
  EXPECT_EQ(outcome.statuses[2].message(),
            "rank 2 waited 0.3 s for rank 3 in last, epoch 5: expected signal 5, seen 4");
}

TEST(CommunicatorFaults, ADoubledSignalChangesNothing) {
  for (const int64_t number : {0, 5, 11, 29}) {
    Faults faults;
    faults.double_signal = number;
    expect_all_ok(run(3, faults, {.timeout = 5s}, ten_layers));
  }
}

TEST(CommunicatorFaults, DelaysAndJitterChangeNothing) {  // F14
  Faults faults;
  faults.delay = 1ms;
  faults.jitter = 5ms;
  expect_all_ok(run(0, faults, {.timeout = 5s}, ten_layers));
}

// F15: in exchange and all_reduce, even puts are headers and odd puts are parts.
TEST(CommunicatorFaults, AFlippedBitIsFoundAndAttributed) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    Faults faults;
    faults.seed = seed;
    faults.flip_put = static_cast<int64_t>(seed * 5 % 40);
    const Outcome outcome = run(2, faults, {.timeout = 5s, .checksum = true}, ten_layers);
    expect_all(
        outcome, StatusCode::kDataLoss,
        {"rank 2 sent a corrupt record to rank ", "layer", "epoch", "checksum 0x", "announced", "computed"});
  }
}

TEST(CommunicatorFaults, ASkippedOperationIsAMismatch) {  // F5
  const Outcome outcome = run(-1, {}, {.timeout = 5s}, [](Communicator& comm) -> Status {
    for (int layer = 0; layer < 5; ++layer) {
      if (layer == 3 && comm.rank() == 1) continue;
      const Status status = comm.exchange({"dispatch", layer}, nullptr, 0, nullptr);
      if (!status.ok()) return status;
    }
    return comm.barrier({"end"});
  });
  expect_all(outcome, StatusCode::kInternal,
             {"disagree", "layer: ", "rank 1", "epoch 4", "3 on rank", "4 on rank"});
  EXPECT_LT(outcome.took, 2s);
}

TEST(CommunicatorFaults, ADoubledOperationIsAMismatch) {  // F5
  const Outcome outcome = run(-1, {}, {.timeout = 5s}, [](Communicator& comm) -> Status {
    for (int layer = 0; layer < 5; ++layer)
      for (int i = 0; i < (layer == 2 && comm.rank() == 3 ? 2 : 1); ++i) {
        const Status status = comm.exchange({"dispatch", layer}, nullptr, 0, nullptr);
        if (!status.ok()) return status;
      }
    return comm.barrier({"end"});
  });
  expect_all(outcome, StatusCode::kInternal, {"disagree", "layer: ", "rank 3", "epoch 4"});
}

// One rank differs in one thing: F11, F22.
struct Difference {
  const char* what;
  std::vector<const char*> words;
  Status (*op)(Communicator& comm, bool odd);
};

Status reduce_elems(Communicator& comm, int64_t n, const OpName& name) {
  std::vector<float> x(static_cast<size_t>(n));
  return comm.all_reduce(name, x.data(), n);
}

std::vector<Difference> differences() {
  return {
      {"op",
       {"on op: ", "dispatch on rank ", "combine on rank "},
       [](Communicator& c, bool odd) {
         return c.exchange({odd ? "combine" : "dispatch", 3}, nullptr, 0, nullptr);
       }},
      {"kind",
       {"on kind: ", "barrier on rank ", "exchange on rank "},
       [](Communicator& c, bool odd) {
         return odd ? c.barrier({"sync", 3}) : c.exchange({"sync", 3}, nullptr, 0, nullptr);
       }},
      {"layer",
       {"on layer: ", "4 on rank ", "3 on rank "},
       [](Communicator& c, bool odd) {
         return c.exchange({"dispatch", odd ? 4 : 3}, nullptr, 0, nullptr);
       }},
      {"geometry",
       {"on geometry: ", "0x0000beef on rank ", "0x0000abba on rank "},
       [](Communicator& c, bool odd) {
         return c.exchange({"dispatch", 3, odd ? 0xbeefu : 0xabbau}, nullptr, 0, nullptr);
       }},
      {"record",
       {"on bytes: ", "8 on rank ", "4 on rank "},
       [](Communicator& c, bool odd) {
         int64_t mine = 0, all[kRanks];
         return c.exchange({"dispatch", 3}, &mine, odd ? 8 : 4, all);
       }},
      {"elements",
       {"on bytes: ", "24 on rank ", "28 on rank "},
       [](Communicator& c, bool odd) {
         return reduce_elems(c, odd ? 6 : 7, {"attention", 1});
       }},
      {"pieces",
       {"on bytes: ", "40000 on rank ", "4000 on rank "},
       [](Communicator& c, bool odd) {
         return reduce_elems(c, odd ? 1000 : 10000, {"attention", 1});
       }},
      {"counts",
       {"on geometry: 0x"},
       [](Communicator& c, bool odd) {
         const int64_t a[kRanks] = {3, 4, 5, 6}, b[kRanks] = {4, 3, 5, 6};
         char out[18] = {};
         return c.all_gather({"rows", 1}, "123456", odd ? b : a, out);
       }},
      {"root",
       {"on geometry: 0x"},
       [](Communicator& c, bool odd) {
         char data[8] = {};
         return c.broadcast({"step"}, odd ? 1 : 0, data, 8);
       }},
  };
}

TEST(CommunicatorFaults, EveryDifferenceNamesBothValues) {
  for (const Difference& d : differences()) {
    SCOPED_TRACE(d.what);
    const Outcome outcome =
        run(-1, {}, {.timeout = 5s}, [&](Communicator& comm) { return d.op(comm, comm.rank() == 2); });
    expect_all(outcome, StatusCode::kInternal, {"disagree in epoch 1", "rank 2"});
    for (const char* word : d.words)
      EXPECT_NE(outcome.statuses[0].message().find(word), std::string::npos)
          << word << " in " << outcome.statuses[0].message();
    EXPECT_LT(outcome.took, 2s);
  }
}

// Rank 2 waits for rank 1 in one group, and rank 1 for rank 0 in another; the error names the end of the
// chain.
TEST(CommunicatorFaults, TheErrorFollowsTheChainOfWaits) {
  const int64_t bytes = Communicator::heap_bytes(2, 64, 64);
  const auto job = threads_job(kRanks, 2 * bytes);
  on_every_rank(kRanks, [&](int rank) {
    const CommOptions slow = {.timeout = 20s}, fast = {.timeout = 300ms};
    Communicator late(job->endpoint(rank), rank / 2 * 2, 2, {.record_bytes = 64, .staging_bytes = 64}, slow);
    if (rank == 0) {
      std::this_thread::sleep_for(700ms);  // rank 1 waits for it, and rank 2 for rank 1
    } else if (rank == 1) {
      EXPECT_FALSE(late.barrier({"late"}).ok());
    } else if (rank == 2) {
      Communicator pair(job->endpoint(rank), 1, 2,
                        {.offset = bytes, .record_bytes = 64, .staging_bytes = 64, .first_slot = 4}, fast);
      EXPECT_EQ(pair.barrier({"pair", 5}).message(),
                "rank 2 waited 0.3 s for rank 1, which waits for rank 0, in pair, layer 5, epoch 1: expected "
                "signal 1, seen 0");
    }
  });
}

TEST(CommunicatorFaults, ASlowPeerIsNamedOnceAndCounted) {
  std::mutex mutex;
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel level, std::string_view line) {
    std::lock_guard lock(mutex);
    if (level == LogLevel::kWarning) lines.emplace_back(line);
  });
  Faults faults;
  faults.stall_at = 0;
  faults.stall = 1300ms;
  std::vector<WaitStats> stats(kRanks);
  const Outcome outcome = run(2, faults, {.timeout = 10s}, [&](Communicator& comm) {
    const Status status = ten_layers(comm);
    stats[static_cast<size_t>(comm.rank())] = comm.wait_stats(2);
    return status;
  });
  set_log_sink({});
  expect_all_ok(outcome);
  EXPECT_GE(lines.size(), 1u);
  EXPECT_LE(lines.size(), static_cast<size_t>(kRanks - 1));  // at most once per waiting rank
  for (const std::string& line : lines)
    EXPECT_NE(line.find("rank 2 is slow: rank "), std::string::npos) << line;
  EXPECT_GE(stats[0].longest, 1s);
  EXPECT_GT(stats[0].waits, 10);
  EXPECT_GE(stats[0].total, stats[0].longest);
}

TEST(CommunicatorFaults, WithoutADeadlineOnlyAFailureEndsTheWait) {
  const Outcome outcome = run(-1, {}, {.timeout = 100ms}, [](Communicator& comm) -> Status {
    comm.set_timeout(kNoDeadline);
    if (comm.rank() == 0) {
      std::this_thread::sleep_for(1200ms);  // longer than the deadline and the slow-peer limit of 1 s
      comm.endpoint().fail(cancelled("shut down"));
      return comm.endpoint().failure();
    }
    return comm.barrier({"idle"});
  });
  expect_all(outcome, StatusCode::kCancelled, {"shut down"});
}

}  // namespace
}  // namespace fp4moe
