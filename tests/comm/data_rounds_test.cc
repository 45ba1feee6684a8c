// Tests put, data_ready and wait_data: many rounds of dispatch and combine over one pair of regions.
#include <gtest/gtest.h>

#include <cstring>

#include "base/check.h"
#include "comm/communicator.h"
#include "comm/faulty_endpoint.h"
#include "comm/rank_threads.h"

namespace fp4moe {
namespace {

using test::Faults;
using test::FaultyEndpoint;
using test::on_every_rank;
using test::threads_job;

constexpr int64_t kRow = 512;  // bytes that one rank sends to another in one round

uint8_t value_of(int layer, int round, int src, int dst, int64_t i) {
  return static_cast<uint8_t>(layer * 101 + round * 31 + src * 7 + dst * 3 + i);
}

// Runs one exchange, then `rounds` rounds of dispatch (value_of) and combine (its complement), always through
// the same region per pair of ranks.
Status run_layer(Communicator& comm, int layer, int rounds, int64_t dispatch_at, int64_t combine_at) {
  const OpName op = {"dispatch", layer, 5};
  const int n = comm.size(), me = comm.rank();
  std::vector<int32_t> all(static_cast<size_t>(n));
  const int32_t mine = rounds;
  FP4MOE_RETURN_IF_ERROR(comm.exchange(op, &mine, 4, all.data()));
  std::vector<uint8_t> row(kRow);
  for (int round = 0; round < rounds; ++round) {
    for (int dst = 0; dst < n; ++dst) {
      for (int64_t i = 0; i < kRow; ++i) row[static_cast<size_t>(i)] = value_of(layer, round, me, dst, i);
      FP4MOE_RETURN_IF_ERROR(comm.put(dst, dispatch_at + me * kRow, row.data(), kRow));
      FP4MOE_RETURN_IF_ERROR(comm.data_ready(op, dst));
    }
    for (int src = 0; src < n; ++src) {
      FP4MOE_RETURN_IF_ERROR(comm.wait_data(op, src));
      const uint8_t* got = comm.endpoint().heap() + dispatch_at + src * kRow;
      for (int64_t i = 0; i < kRow; ++i) {
        if (got[i] != value_of(layer, round, src, me, i)) return data_loss("dispatch");
        row[static_cast<size_t>(i)] = static_cast<uint8_t>(~got[i]);
      }
      FP4MOE_RETURN_IF_ERROR(comm.put(src, combine_at + me * kRow, row.data(), kRow));
      FP4MOE_RETURN_IF_ERROR(comm.data_ready(op, src));
    }
    for (int dst = 0; dst < n; ++dst) {
      FP4MOE_RETURN_IF_ERROR(comm.wait_data(op, dst));
      const uint8_t* got = comm.endpoint().heap() + combine_at + dst * kRow;
      for (int64_t i = 0; i < kRow; ++i)
        if (got[i] != static_cast<uint8_t>(~value_of(layer, round, me, dst, i))) return data_loss("combine");
    }
  }
  return {};
}

void run_layers(int num_ranks, int layers, const Faults& faults, uint32_t first_epoch) {
  const int64_t comm_bytes = Communicator::heap_bytes(num_ranks, 64, 1024);
  const auto job = threads_job(num_ranks, comm_bytes + 2 * num_ranks * kRow, first_epoch - 1);
  on_every_rank(num_ranks, [&](int rank) {
    FaultyEndpoint endpoint(job->endpoint(rank), faults);
    Communicator comm(endpoint, 0, num_ranks, {.record_bytes = 64, .staging_bytes = 1024},
                      {.first_epoch = first_epoch});
    for (int layer = 0; layer < layers; ++layer) {
      const Status status = run_layer(comm, layer, layer % 4, comm_bytes, comm_bytes + num_ranks * kRow);
      ASSERT_TRUE(status.ok()) << "rank " << rank << " layer " << layer << ": " << status.to_string();
      float x = 1;
      ASSERT_TRUE(comm.all_reduce({"all_reduce", layer}, &x, 1).ok());
      ASSERT_EQ(x, static_cast<float>(num_ranks));
    }
  });
}

TEST(DataRounds, RegionsAreReusedSafely) {
  for (const int num_ranks : {1, 2, 3, 4, 8}) run_layers(num_ranks, 200, {}, 1);
}

TEST(DataRounds, CountersWrap) { run_layers(3, 20, {}, 0xfffffffdu); }

TEST(DataRounds, RandomYieldsAndJitterChangeNothing) {  // F14, F19
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    Faults faults;
    faults.seed = seed;
    faults.yield_probability = 0.5;
    run_layers(4, 60, faults, 1);
    faults.jitter = std::chrono::microseconds(200);
    run_layers(4, 20, faults, 1);
  }
}

// A round that one rank skips is detected at the next operation, because the counts of the two ranks differ.
TEST(DataRounds, AMissingRoundIsFound) {
  constexpr int kRanks = 3;
  const auto job = threads_job(kRanks, Communicator::heap_bytes(kRanks, 64, 1024));
  on_every_rank(kRanks, [&](int rank) {
    Communicator comm(job->endpoint(rank), 0, kRanks, {.record_bytes = 64, .staging_bytes = 1024}, {});
    Status status = comm.exchange({"dispatch", 1}, nullptr, 0, nullptr);
    if (status.ok() && rank == 1) status = comm.data_ready({"dispatch", 1}, 2);
    if (status.ok()) status = comm.barrier({"next"});
    if (status.ok()) status = comm.barrier({"after"});  // rank 0 is not involved in the mismatch
    ASSERT_EQ(status.code(), StatusCode::kInternal);
    EXPECT_NE(status.message().find("data rounds"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("rank 1"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("rank 2"), std::string::npos) << status.message();
  });
}

}  // namespace
}  // namespace fp4moe
