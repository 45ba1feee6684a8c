// The NCCL communicator over a library that stands in for NCCL (fake_nccl.cc): loading and its errors,
// transfers between ranks, and every way in which a communicator fails.
#include "comm/nccl_comm.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace fp4moe {
namespace {

using namespace std::chrono_literals;

Result<Nccl> open_fake(const char* folder = FAKE_NCCL_FOLDER) {
  setenv("FP4MOE_CUDA_LIBS", folder, 1);
  return Nccl::open();
}

// Calls a function with which the fake library is controlled. The library must have been opened.
template <class Argument>
void control(const char* function, Argument argument) {
  void* const library = dlopen(FAKE_NCCL_FOLDER "/libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  reinterpret_cast<void (*)(Argument)>(dlsym(library, function))(argument);
}
void set_fault(const char* name) { control("fake_nccl_set_fault", name); }

// Connects the ranks of a communicator, and runs function(comm) for each of them, on its own thread, while
// the library has this fault.
void on_ranks(int num_ranks, const NcclCommOptions& options, const char* fault,
              const std::function<void(NcclComm&)>& function) {
  const Nccl nccl = open_fake().value();
  const NcclId id = NcclComm::make_id(nccl).value();
  std::barrier connected(num_ranks, [&]() noexcept { set_fault(fault); });
  std::barrier done(num_ranks, []() noexcept { set_fault(""); });
  std::vector<std::thread> threads;
  for (int r = 0; r < num_ranks; ++r)
    threads.emplace_back([&, r] {
      NcclCommOptions own = options;
      own.rank = r;
      own.num_ranks = num_ranks;
      const auto comm = NcclComm::open(nccl, id, own);
      EXPECT_TRUE(comm.ok()) << comm.status().to_string();
      connected.arrive_and_wait();
      if (comm.ok()) function(**comm);
      done.arrive_and_wait();
    });
  for (std::thread& thread : threads) thread.join();
}

bool eventually(const std::function<bool()>& holds) {
  for (int i = 0; i < 500 && !holds(); ++i) std::this_thread::sleep_for(10ms);
  return holds();
}

TEST(Nccl, VersionTexts) {
  EXPECT_EQ(nccl_version_text(22809), "2.28.9");
  EXPECT_EQ(nccl_version_text(22803), "2.28.3");
  EXPECT_EQ(nccl_version_text(2708), "2.7.8");
}

TEST(Nccl, OpensAndNamesTheLibrary) {
  const auto nccl = open_fake();
  ASSERT_TRUE(nccl.ok()) << nccl.status().to_string();
  EXPECT_EQ(nccl->version, 22809);
  EXPECT_EQ(nccl->path, std::string(FAKE_NCCL_FOLDER) + "/libnccl.so.2");
  EXPECT_STREQ(std::getenv("NCCL_NVLS_ENABLE"), "0");
}

TEST(Nccl, OldVersionIsRefused) {
  ASSERT_TRUE(open_fake().ok());
  control("fake_nccl_set_version", 22802);
  const Status status = open_fake().status();
  control("fake_nccl_set_version", 22809);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_EQ(status.message(), "NCCL at " + std::string(FAKE_NCCL_FOLDER) +
                                  "/libnccl.so.2 has version 2.28.2; needed: 2.28.3 or newer");
}

TEST(Nccl, MissingFunctionIsRefused) {
  const Status status = open_fake(FAKE_NCCL_WITHOUT_RECEIVE_FOLDER).status();
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("has no ncclRecv"), std::string::npos) << status.message();
}

TEST(NcclComm, TransfersBetweenAllRanks) {
  for (const int num_ranks : {1, 2, 4})
    on_ranks(num_ranks, {}, "", [&](NcclComm& comm) {
      for (int round = 0; round < 20; ++round) {
        std::vector<int> sent, received(static_cast<size_t>(num_ranks), -1);
        for (int peer = 0; peer < num_ranks; ++peer) sent.push_back(100 * round + 10 * comm.rank() + peer);
        std::vector<PlaneTransfer> transfers;
        for (int peer = 0; peer < num_ranks; ++peer) {
          const auto i = static_cast<size_t>(peer);
          if (peer != comm.rank()) transfers.push_back({peer, &sent[i], 4, &received[i], 4});
        }
        transfers.push_back({(comm.rank() + 1) % num_ranks, nullptr, 0, nullptr, 0});
        const Status status = comm.exchange({"rows", 3}, transfers, nullptr);
        EXPECT_TRUE(status.ok()) << status.to_string();
        for (int peer = 0; peer < num_ranks; ++peer)
          EXPECT_EQ(received[static_cast<size_t>(peer)],
                    peer == comm.rank() ? -1 : 100 * round + 10 * peer + comm.rank());
      }
      EXPECT_TRUE(comm.failure().ok());
    });
}

TEST(NcclComm, RanksThatDoNotConnect) {
  const Nccl nccl = open_fake().value();
  set_fault("connect");
  NcclCommOptions options{.rank = 1, .num_ranks = 2, .start_timeout = 50ms};
  const Status status = NcclComm::open(nccl, NcclComm::make_id(nccl).value(), options).status();
  set_fault("");
  EXPECT_EQ(status.code(), StatusCode::kDeadline);
  EXPECT_EQ(status.message(), "rank 1: waited 0.05 s for the other ranks in ncclCommInitRankConfig");
}

TEST(NcclComm, ErrorOfACallNamesRankAndOperation) {
  std::atomic<int> reported = 0;
  on_ranks(2, {.on_failure = [&](const Status&) { ++reported; }}, "send", [](NcclComm& comm) {
    int word = 0;
    const PlaneTransfer transfer{1 - comm.rank(), &word, 4, &word, 4};
    const Status status = comm.exchange({"dispatch", 3}, {&transfer, 1}, nullptr);
    EXPECT_EQ(status.code(), StatusCode::kInternal);
    EXPECT_EQ(status.message(), "rank " + std::to_string(comm.rank()) +
                                    " in dispatch, layer 3: ncclSend: invalid usage (fake details)");
    EXPECT_EQ(comm.failure().message(), status.message());
    EXPECT_EQ(comm.exchange({"combine"}, {&transfer, 1}, nullptr).message(), status.message());
  });
  EXPECT_EQ(reported, 2);
}

TEST(NcclComm, GroupThatNeverEnds) {
  on_ranks(2, {.timeout = 100ms}, "group", [](NcclComm& comm) {
    int sent = 0, received = 0;
    const PlaneTransfer transfer{1 - comm.rank(), &sent, 4, &received, 4};
    const auto begin = std::chrono::steady_clock::now();
    const Status status = comm.exchange({"logits"}, {&transfer, 1}, nullptr);
    EXPECT_EQ(status.code(), StatusCode::kDeadline);
    EXPECT_EQ(status.message(), "rank " + std::to_string(comm.rank()) +
                                    " in logits: waited 0.10 s for the other ranks in ncclGroupEnd");
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
  });
}

TEST(NcclComm, HostWaitPastTheDeadlineAborts) {
  Status reported;
  on_ranks(1, {.timeout = 100ms, .on_failure = [&](const Status& status) { reported = status; }}, "",
           [](NcclComm& comm) {
             { const HostWait wait(&comm, "a short step"); }
             std::this_thread::sleep_for(300ms);  // no wait: no deadline
             EXPECT_TRUE(comm.failure().ok());
             const HostWait wait(&comm, "the graph of 8 decode rows");
             EXPECT_TRUE(eventually([&] { return !comm.failure().ok(); }));
             EXPECT_EQ(comm.failure().code(), StatusCode::kDeadline);
           });
  EXPECT_EQ(reported.message(), "rank 0 waited 0.10 s for the other ranks in the graph of 8 decode rows");
}

TEST(NcclComm, AsynchronousErrorIsFound) {
  on_ranks(2, {}, "async", [](NcclComm& comm) {
    EXPECT_TRUE(eventually([&] { return !comm.failure().ok(); }));
    EXPECT_EQ(
        comm.failure().message(),
        "rank " + std::to_string(comm.rank()) +
            ": ncclCommGetAsyncError: remote process exited or there was a network error (fake details)");
  });
}

// Each rank waits for a peer that never sends, until the job fails.
TEST(NcclComm, FailureOfTheJobEndsAWait) {
  std::atomic<bool> has_failed = false;
  std::atomic<int> reported = 0;
  const NcclCommOptions options{
      .job_failure = [&] { return has_failed ? unavailable("process 1 ended unexpectedly") : Status(); },
      .on_failure = [&](const Status&) { ++reported; }};
  on_ranks(2, options, "", [&](NcclComm& comm) {
    std::thread fails([&] {
      std::this_thread::sleep_for(100ms);
      has_failed = true;
    });
    int received = 0;
    const PlaneTransfer transfer{1 - comm.rank(), nullptr, 0, &received, 4};
    const Status status = comm.exchange({"gather"}, {&transfer, 1}, nullptr);
    EXPECT_EQ(status.code(), StatusCode::kUnavailable);
    EXPECT_NE(status.message().find("process 1 ended unexpectedly"), std::string::npos) << status.message();
    fails.join();
  });
  EXPECT_EQ(reported, 0);  // the job has it already
}

}  // namespace
}  // namespace fp4moe
