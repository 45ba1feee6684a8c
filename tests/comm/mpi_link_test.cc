// Tests the communication thread without MPI: one process simulates several processes of a job, connected by
// a post office that can withhold messages or fail.
#include "comm/mpi_link.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "comm/communicator.h"
#include "comm/mpi_endpoint.h"
#include "comm/rank_threads.h"

namespace fp4moe {
namespace {

using namespace std::chrono_literals;
using test::on_every_rank;

constexpr int kMostProcesses = 3;

struct Message {
  std::vector<uint8_t> bytes;
  std::shared_ptr<bool> taken;
};

// Messages between the processes; a send completes once its message has been received.
struct PostOffice {
  std::mutex mutex;
  std::deque<Message> inbox[kMostProcesses][kMostProcesses];  // [to][from]
  int num_processes = 0, claimed_processes = 0;
  bool is_closed[kMostProcesses] = {};  // receives nothing
  bool is_stuck[kMostProcesses] = {};   // never completes a message
  bool probe_fails[kMostProcesses] = {};
  int finalized = 0;
  std::deque<std::shared_ptr<bool>> requests;  // all requests made; a failed job leaves some unfinished
} office;

template <int kProcess>
struct Fake {
  static int init(int* process, int* num_processes) {
    std::lock_guard lock(office.mutex);
    *process = kProcess;
    *num_processes = office.claimed_processes;
    return 0;
  }
  static int send(int process, const void* data, int num_bytes, void** request) {
    std::lock_guard lock(office.mutex);
    const uint8_t* bytes = static_cast<const uint8_t*>(data);
    auto taken = std::make_shared<bool>(false);
    *request = &office.requests.emplace_back(taken);
    office.inbox[process][kProcess].push_back({{bytes, bytes + num_bytes}, taken});
    return 0;
  }
  static int done(void** request, int* is_done) {
    std::lock_guard lock(office.mutex);
    auto* taken = static_cast<std::shared_ptr<bool>*>(*request);
    *is_done = **taken;
    if (**taken) *request = nullptr;
    return 0;
  }
  static int probe(int process, int* num_bytes, int* is_there) {
    std::lock_guard lock(office.mutex);
    if (office.probe_fails[kProcess]) return 13;
    const auto& inbox = office.inbox[kProcess][process];
    *is_there = !inbox.empty() && !office.is_closed[kProcess];
    if (*is_there != 0) *num_bytes = static_cast<int>(inbox.front().bytes.size());
    return 0;
  }
  static int receive(int process, void* data, int num_bytes, void** request) {
    std::lock_guard lock(office.mutex);
    auto& inbox = office.inbox[kProcess][process];
    std::memcpy(data, inbox.front().bytes.data(), static_cast<size_t>(num_bytes));
    *inbox.front().taken = !office.is_stuck[kProcess];
    *request = &office.requests.emplace_back(inbox.front().taken);
    inbox.pop_front();
    return 0;
  }
  static int finalize() {
    std::lock_guard lock(office.mutex);
    return ++office.finalized, 0;
  }
  static void abort(int) {}
  static void error_text(int error, char* text, int text_bytes) {
    std::snprintf(text, static_cast<size_t>(text_bytes), "error number %d", error);
  }
  static constexpr Fp4moeMpi table = {FP4MOE_MPI_ABI, init,     probe, send,      receive,
                                      done,           finalize, abort, error_text};
};

const Fp4moeMpi& fake(int process) {
  const Fp4moeMpi* tables[] = {&Fake<0>::table, &Fake<1>::table, &Fake<2>::table};
  return *tables[process];
}

// The simulated processes of a job.
class MpiLinkTest : public testing::Test {
 protected:
  void open(int num_processes, int ranks_each, std::chrono::nanoseconds timeout = 10s) {
    office.num_processes = office.claimed_processes = num_processes;
    office.finalized = 0;
    for (int p = 0; p < kMostProcesses; ++p) {
      for (auto& inbox : office.inbox[p]) inbox.clear();
      office.is_closed[p] = office.is_stuck[p] = office.probe_fails[p] = false;
    }
    num_ranks_ = num_processes * ranks_each;
    for (int p = 0; p < num_processes; ++p) {
      auto made = RankMemory::make({.num_ranks = num_ranks_,
                                    .first_rank = p * ranks_each,
                                    .num_local_ranks = ranks_each,
                                    .heap_bytes = kHeap});
      memories_.emplace_back(std::move(*made));
      const Hello hello = {.process = p,
                           .num_processes = num_processes,
                           .num_ranks = num_ranks_,
                           .heap_bytes = kHeap,
                           .version = "1",
                           .config = configs_.count(p) != 0 ? configs_[p] : "same",
                           .data = "data of " + std::to_string(p)};
      links_.push_back(std::make_shared<MpiLink>(fake(p), memories_.back(), hello, timeout));
    }
    for (int rank = 0; rank < num_ranks_; ++rank) {
      const size_t p = static_cast<size_t>(rank / ranks_each);
      endpoints_.push_back(std::make_unique<MpiEndpoint>(*memories_[p], *links_[p], rank));
    }
  }
  // Calls MpiLink::start() on each of the first num_processes processes.
  std::vector<Status> start(int num_processes, std::chrono::nanoseconds timeout = 10s) {
    std::vector<Status> statuses(static_cast<size_t>(num_processes));
    on_every_rank(num_processes, [&](int p) {
      statuses[static_cast<size_t>(p)] = MpiLink::start(links_[static_cast<size_t>(p)], timeout);
    });
    return statuses;
  }
  void expect_started(int num_processes) {
    for (const Status& status : start(num_processes)) ASSERT_TRUE(status.ok()) << status.to_string();
  }
  void stop() {
    on_every_rank(static_cast<int>(links_.size()), [&](int p) { links_[static_cast<size_t>(p)]->stop(); });
  }
  Endpoint& endpoint(int rank) { return *endpoints_[static_cast<size_t>(rank)]; }

  static constexpr int64_t kHeap = 12 << 20;
  int num_ranks_ = 0;
  std::map<int, std::string> configs_;
  std::vector<std::shared_ptr<RankMemory>> memories_;
  std::vector<std::shared_ptr<MpiLink>> links_;
  std::vector<std::unique_ptr<MpiEndpoint>> endpoints_;
};

TEST_F(MpiLinkTest, OperationsBetweenAndInsideProcesses) {
  open(3, 2);
  expect_started(3);
  on_every_rank(num_ranks_, [&](int rank) {
    Communicator comm(endpoint(rank), 0, num_ranks_, {.record_bytes = 64, .staging_bytes = 8192}, {});
    for (int i = 0; i < 30; ++i) {
      std::vector<float> x(3000, static_cast<float>(rank));
      ASSERT_TRUE(comm.all_reduce({"all_reduce", i}, x.data(), 3000).ok());
      for (const float v : x) ASSERT_EQ(v, 15.0f);
    }
  });
  stop();
  EXPECT_EQ(office.finalized, 3);
}

TEST_F(MpiLinkTest, AllProcessesGetTheDataOfTheFirst) {
  open(3, 1);
  expect_started(3);
  for (const auto& link : links_) EXPECT_EQ(link->data(), "data of 0");
  stop();
}

TEST_F(MpiLinkTest, LargePutsArriveWholeWhateverTheQueueHolds) {
  open(2, 1);
  expect_started(2);
  constexpr int64_t kBytes = 11 << 20;  // more than a queue or a frame holds
  on_every_rank(2, [&](int rank) {
    std::vector<uint8_t> data(kBytes);
    for (int round = 1; round <= 3; ++round) {
      for (int64_t i = 0; i < kBytes; ++i)
        data[static_cast<size_t>(i)] = static_cast<uint8_t>(i * 7 + i / 1000 + rank + round);
      uint32_t seen = 0;
      ASSERT_TRUE(endpoint(rank).put(1 - rank, 128, data.data(), kBytes).ok());
      ASSERT_TRUE(endpoint(rank).signal(1 - rank, 0, static_cast<uint32_t>(round)).ok());
      ASSERT_TRUE(endpoint(rank).wait(1 - rank, 0, static_cast<uint32_t>(round), 30s, &seen).ok());
      const uint8_t* got = endpoint(rank).heap() + 128;
      int64_t wrong = 0;
      for (int64_t i = 0; i < kBytes; ++i)
        wrong += got[i] != static_cast<uint8_t>(i * 7 + i / 1000 + 1 - rank + round);
      ASSERT_EQ(wrong, 0);
      ASSERT_TRUE(endpoint(rank).signal(1 - rank, 1, static_cast<uint32_t>(round)).ok());
      ASSERT_TRUE(endpoint(rank).wait(1 - rank, 1, static_cast<uint32_t>(round), 30s, &seen).ok());
    }
  });
  stop();
}

TEST_F(MpiLinkTest, AProcessThatTakesNothingHoldsTheSenderUntilTheDeadline) {
  open(2, 1, 300ms);
  expect_started(2);
  {
    std::lock_guard lock(office.mutex);
    office.is_closed[1] = true;
  }
  const std::vector<uint8_t> data(1 << 20);
  Status status;
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 100 && status.ok(); ++i) status = endpoint(0).put(1, 0, data.data(), 1 << 20);
  EXPECT_EQ(status.code(), StatusCode::kDeadline);
  EXPECT_EQ(status.message(),
            "rank 0 could not send to rank 1: process 1 (rank 1) received nothing before the deadline");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
  stop();
}

// A sender can die in the middle of a message; the thread then continues with the messages of other senders.
TEST_F(MpiLinkTest, AMessageThatNeverEndsHoldsUpNobodyElse) {
  open(3, 1, 300ms);
  expect_started(3);
  const auto stick = [](bool is_stuck) {
    std::lock_guard lock(office.mutex);
    office.is_stuck[0] = is_stuck;
  };
  uint32_t seen = 0;
  stick(true);
  ASSERT_TRUE(endpoint(1).signal(0, 0, 1).ok());
  EXPECT_EQ(endpoint(0).wait(1, 0, 1, 200ms, &seen).code(), StatusCode::kDeadline);
  stick(false);
  ASSERT_TRUE(endpoint(2).signal(0, 0, 1).ok());
  EXPECT_TRUE(endpoint(0).wait(2, 0, 1, 10s, &seen).ok());
  ASSERT_TRUE(endpoint(0).signal(1, 0, 1).ok());
  EXPECT_TRUE(endpoint(1).wait(0, 0, 1, 10s, &seen).ok());
  endpoint(0).fail(cancelled("the end"));
  stop();
}

TEST_F(MpiLinkTest, AFailureReachesAllProcesses) {
  open(3, 1);
  expect_started(3);
  on_every_rank(3, [&](int rank) {
    uint32_t seen = 0;
    if (rank == 1) endpoint(rank).fail(data_loss("broken on rank 1"));
    const Status status = endpoint(rank).wait(1, 0, 1, 20s, &seen);
    EXPECT_EQ(status.to_string(), "data_loss: broken on rank 1");
  });
  stop();
  EXPECT_EQ(office.finalized, 3);  // the processes still end together
}

TEST_F(MpiLinkTest, DifferentConfigurationsEndTheStartEverywhere) {
  configs_[2] = "other";
  open(3, 1);
  for (const Status& status : start(3)) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("'other' on process 2"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("'same' on process "), std::string::npos) << status.message();
  }
  stop();
}

TEST_F(MpiLinkTest, AProcessThatDoesNotComeIsNamed) {  // F12
  open(3, 2);
  for (const Status& status : start(2, 300ms)) {
    EXPECT_EQ(status.code(), StatusCode::kDeadline);
    EXPECT_NE(status.message().find("for process 2 (ranks 4 to 5)"), std::string::npos) << status.message();
  }
  links_.pop_back();
  stop();
}

TEST_F(MpiLinkTest, AnotherSizeThanTheLaunchersIsAnError) {
  open(2, 1);
  office.claimed_processes = 3;
  const Status status = MpiLink::start(links_[0], 10s);
  EXPECT_EQ(status.message(),
            "MPI reports process 0 of 3, but the launcher's environment has process 0 of 2");
  stop();
}

TEST_F(MpiLinkTest, AnErrorOfMpiEndsTheJob) {
  open(2, 1, 500ms);
  expect_started(2);
  {
    std::lock_guard lock(office.mutex);
    office.probe_fails[0] = true;
  }
  uint32_t seen = 0;
  const Status status = endpoint(0).wait(1, 0, 1, 10s, &seen);
  EXPECT_EQ(status.to_string(), "internal: MPI_Iprobe on process 0: error number 13");
  stop();
}

TEST_F(MpiLinkTest, AMessageThatCannotBeEndsTheJob) {
  open(2, 1);
  expect_started(2);
  void* request = nullptr;
  Fake<0>::send(1, "rubbish", 7, &request);
  on_every_rank(2, [&](int rank) {
    uint32_t seen = 0;
    const Status status = endpoint(rank).wait(1 - rank, 0, 1, 20s, &seen);
    EXPECT_EQ(status.to_string(), "data_loss: message from process 0: bytes=7 must be at least 16");
  });
  stop();
}

}  // namespace
}  // namespace fp4moe
