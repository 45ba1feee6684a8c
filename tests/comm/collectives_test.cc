// Compares every collective with plain loops over the inputs of all ranks, including ragged and empty
// operands.
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "comm/communicator.h"
#include "comm/rank_threads.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

using test::on_every_rank;
using test::threads_job;

struct Setup {
  int num_ranks;
  int64_t record_bytes = 256;
  int64_t staging_bytes = 4096;
  uint32_t first_epoch = 1;
  bool checksum = false;
};

// Runs body(communicator) on every rank, with one group of all ranks.
template <class Body>
void with_communicators(const Setup& setup, const Body& body) {
  const int64_t heap = Communicator::heap_bytes(setup.num_ranks, setup.record_bytes, setup.staging_bytes);
  const auto job = threads_job(setup.num_ranks, heap, setup.first_epoch - 1);
  on_every_rank(setup.num_ranks, [&](int rank) {
    Communicator comm(job->endpoint(rank), 0, setup.num_ranks,
                      {.record_bytes = setup.record_bytes, .staging_bytes = setup.staging_bytes},
                      {.first_epoch = setup.first_epoch, .checksum = setup.checksum});
    body(comm);
  });
}

std::vector<float> random_floats(uint64_t seed, int64_t n) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = normal(random) * std::ldexp(1.0f, static_cast<int>(random() % 20));
  return x;
}

// Sums in rank order in f32, as the communicator guarantees.
std::vector<float> sum_in_rank_order(const std::vector<std::vector<float>>& x) {
  std::vector<float> sum = x[0];
  for (size_t r = 1; r < x.size(); ++r)
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += x[r][i];
  return sum;
}

// Sizes around the piece size: zero, one, below and above a part, several blocks and a remainder.
std::vector<int64_t> sizes() { return {0, 1, 7, 64, 1000, 1024, 1025, 5000}; }

std::vector<int64_t> ragged(int num_ranks, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int64_t> counts(static_cast<size_t>(num_ranks));
  for (int64_t& c : counts) c = random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % 3000);
  return counts;
}

class CollectivesOf : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, CollectivesOf, testing::Values(1, 2, 3, 4, 5, 6, 7, 8));

TEST_P(CollectivesOf, AllReduceSumsInRankOrder) {
  const int n = GetParam();
  for (const int64_t size : sizes()) {
    std::vector<std::vector<float>> inputs;
    for (int r = 0; r < n; ++r) inputs.push_back(random_floats(static_cast<uint64_t>(size * 10 + r), size));
    const std::vector<float> expected = sum_in_rank_order(inputs);
    with_communicators({n}, [&](Communicator& comm) {
      std::vector<float> x = inputs[static_cast<size_t>(comm.rank())];
      ASSERT_TRUE(comm.all_reduce({"all_reduce"}, x.data(), size).ok());
      EXPECT_TRUE(same_bits(x, expected)) << "rank " << comm.rank() << " size " << size;
    });
  }
}

TEST_P(CollectivesOf, AllReduceHasTheSameBitsWhateverTheStaging) {
  const int n = GetParam();
  std::vector<std::vector<float>> inputs;
  for (int r = 0; r < n; ++r) inputs.push_back(random_floats(static_cast<uint64_t>(r), 3000));
  const std::vector<float> expected = sum_in_rank_order(inputs);
  for (const int64_t staging : {int64_t{0}, int64_t{1000}, int64_t{1} << 20})
    with_communicators({.num_ranks = n, .staging_bytes = staging}, [&](Communicator& comm) {
      std::vector<float> x = inputs[static_cast<size_t>(comm.rank())];
      ASSERT_TRUE(comm.all_reduce({"all_reduce"}, x.data(), 3000).ok());
      EXPECT_TRUE(same_bits(x, expected)) << "staging " << staging;
    });
}

TEST_P(CollectivesOf, AllToAllGivesEachPairItsBytes) {
  const int n = GetParam();
  const auto size = static_cast<size_t>(n);
  // Byte i of what rank r sends to rank q.
  const auto byte = [](size_t r, size_t q, int64_t i) {
    return static_cast<uint8_t>(static_cast<uint64_t>(i) * 31 + r * 7 + q * 13 + 1);
  };
  for (const int64_t staging : {int64_t{0}, int64_t{4096}, int64_t{1} << 20})
    for (uint64_t seed = 0; seed < 4; ++seed) {
      const std::vector<int64_t> counts = seed == 3 ? std::vector<int64_t>(size * size) : ragged(n * n, seed);
      with_communicators({.num_ranks = n, .staging_bytes = staging}, [&](Communicator& comm) {
        const auto me = static_cast<size_t>(comm.rank());
        std::vector<uint8_t> mine, expected;
        for (size_t q = 0; q < size; ++q) {
          for (int64_t i = 0; i < counts[me * size + q]; ++i) mine.push_back(byte(me, q, i));
          for (int64_t i = 0; i < counts[q * size + me]; ++i) expected.push_back(byte(q, me, i));
        }
        std::vector<uint8_t> out(expected.size());
        ASSERT_TRUE(comm.all_to_all({"all_to_all"}, mine.data(), counts, out.data()).ok());
        EXPECT_EQ(out, expected) << "rank " << me << " seed " << seed;
      });
    }
}

TEST_P(CollectivesOf, ReduceScatterGivesEachItsPart) {
  const int n = GetParam();
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const std::vector<int64_t> counts = ragged(n, seed);
    const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    std::vector<std::vector<float>> inputs;
    for (int r = 0; r < n; ++r) inputs.push_back(random_floats(seed * 100 + static_cast<uint64_t>(r), total));
    const std::vector<float> sum = sum_in_rank_order(inputs);
    with_communicators({n}, [&](Communicator& comm) {
      const size_t me = static_cast<size_t>(comm.rank());
      const int64_t start = std::accumulate(counts.begin(), counts.begin() + comm.rank(), int64_t{0});
      const std::vector<float> expected(sum.begin() + start, sum.begin() + start + counts[me]);
      std::vector<float> out(expected.size());
      ASSERT_TRUE(comm.reduce_scatter({"reduce_scatter"}, inputs[me].data(), counts, out.data()).ok());
      EXPECT_TRUE(same_bits(out, expected));
      std::vector<float> x = inputs[me];  // in place
      ASSERT_TRUE(comm.reduce_scatter({"reduce_scatter"}, x.data(), counts, x.data() + start).ok());
      EXPECT_TRUE(same_bits(std::vector<float>(x.begin() + start, x.begin() + start + counts[me]), expected));
    });
  }
}

uint8_t byte_of(int rank, int64_t i) { return static_cast<uint8_t>(rank * 37 + i * 11 + i / 256); }

TEST_P(CollectivesOf, AllGatherKeepsRankOrder) {
  const int n = GetParam();
  for (uint64_t seed = 0; seed < 8; ++seed) {
    std::vector<int64_t> counts = ragged(n, seed);
    if (seed == 0) counts.assign(counts.size(), 0);
    if (seed == 1) counts.assign(counts.size(), 100);  // fits in a record
    std::vector<uint8_t> expected;
    for (int r = 0; r < n; ++r)
      for (int64_t i = 0; i < counts[static_cast<size_t>(r)]; ++i) expected.push_back(byte_of(r, i));
    with_communicators({.num_ranks = n, .checksum = seed % 2 == 1}, [&](Communicator& comm) {
      const int64_t count = counts[static_cast<size_t>(comm.rank())];
      const int64_t start = std::accumulate(counts.begin(), counts.begin() + comm.rank(), int64_t{0});
      std::vector<uint8_t> mine, out(expected.size() + 1, 0xee);
      for (int64_t i = 0; i < count; ++i) mine.push_back(byte_of(comm.rank(), i));
      ASSERT_TRUE(comm.all_gather({"all_gather"}, mine.data(), counts, out.data()).ok());
      EXPECT_EQ(out.back(), 0xee);
      out.pop_back();
      EXPECT_EQ(out, expected);
      std::vector<uint8_t> in_place(expected.size());
      std::copy(mine.begin(), mine.end(), in_place.begin() + start);
      ASSERT_TRUE(comm.all_gather({"all_gather"}, in_place.data() + start, counts, in_place.data()).ok());
      EXPECT_EQ(in_place, expected);
    });
  }
}

TEST_P(CollectivesOf, BroadcastFromEveryRoot) {
  const int n = GetParam();
  for (int root = 0; root < n; ++root)
    for (const int64_t size : sizes())
      with_communicators({n}, [&](Communicator& comm) {
        std::vector<uint8_t> data(static_cast<size_t>(size)), expected(data.size());
        for (int64_t i = 0; i < size; ++i) expected[static_cast<size_t>(i)] = byte_of(root, i);
        if (comm.rank() == root) data = expected;
        ASSERT_TRUE(comm.broadcast({"broadcast"}, root, data.data(), size).ok());
        EXPECT_EQ(data, expected);
      });
}

TEST_P(CollectivesOf, ExchangeGathersRecords) {
  const int n = GetParam();
  with_communicators({n}, [&](Communicator& comm) {
    for (const int64_t size : {int64_t{0}, int64_t{1}, int64_t{100}, int64_t{256}}) {
      std::vector<uint8_t> mine(static_cast<size_t>(size)), all(static_cast<size_t>(size * n));
      for (int64_t i = 0; i < size; ++i) mine[static_cast<size_t>(i)] = byte_of(comm.rank(), i);
      ASSERT_TRUE(comm.exchange({"counts", 3, 77}, mine.data(), size, all.data()).ok());
      for (int r = 0; r < n; ++r)
        for (int64_t i = 0; i < size; ++i)
          ASSERT_EQ(all[static_cast<size_t>(r * size + i)], byte_of(r, i)) << r << " " << i;
    }
  });
}

TEST_P(CollectivesOf, EpochsWrap) {  // F17: starts at 2^32 - 3
  const int n = GetParam();
  with_communicators({.num_ranks = n, .first_epoch = 0xfffffffdu}, [&](Communicator& comm) {
    EXPECT_EQ(comm.epoch(), 0xfffffffdu);
    for (int i = 0; i < 10; ++i) {
      std::vector<float> x(3000, static_cast<float>(comm.rank() + i));  // several steps each
      ASSERT_TRUE(comm.all_reduce({"all_reduce", i}, x.data(), 3000).ok());
      EXPECT_EQ(x[2999], static_cast<float>(n * (n - 1) / 2 + i * n));
      ASSERT_TRUE(comm.barrier({"barrier"}).ok());
    }
    EXPECT_EQ(comm.epoch(), 17u);
  });
}

TEST(Collectives, ThousandRepeatsHaveTheSameBits) {
  constexpr int kRanks = 4;
  std::vector<std::vector<float>> inputs;
  for (int r = 0; r < kRanks; ++r) inputs.push_back(random_floats(static_cast<uint64_t>(r), 700));
  const std::vector<float> expected = sum_in_rank_order(inputs);
  with_communicators({kRanks}, [&](Communicator& comm) {
    for (int i = 0; i < 1000; ++i) {
      std::vector<float> x = inputs[static_cast<size_t>(comm.rank())];
      ASSERT_TRUE(comm.all_reduce({"all_reduce", i}, x.data(), 700).ok());
      ASSERT_TRUE(same_bits(x, expected)) << "repeat " << i;
    }
  });
}

TEST(Collectives, BarrierHoldsEverybody) {
  constexpr int kRanks = 5;
  std::atomic<int> arrived{0};
  with_communicators({kRanks}, [&](Communicator& comm) {
    for (int i = 1; i <= 200; ++i) {
      arrived.fetch_add(1);
      ASSERT_TRUE(comm.barrier({"barrier"}).ok());
      ASSERT_GE(arrived.load(), i * kRanks);
      ASSERT_TRUE(comm.barrier({"barrier"}).ok());
    }
  });
}

// 32 ranks on a few cores: a sleeping rank frees its core for the other ranks.
TEST(Collectives, ManyRanksOnFewCores) {
  with_communicators({.num_ranks = 32, .staging_bytes = 32 * 1024}, [&](Communicator& comm) {
    for (int i = 0; i < 50; ++i) {
      std::vector<float> x(100, 1.0f);
      ASSERT_TRUE(comm.all_reduce({"all_reduce", i}, x.data(), 100).ok());
      ASSERT_EQ(x[99], 32.0f);
    }
  });
}

// Two groups of two ranks and the world share one heap, but each has separate slots.
TEST(Collectives, GroupsDoNotMeet) {
  constexpr int kRanks = 4;
  const int64_t world_bytes = Communicator::heap_bytes(kRanks, 64, 4096);
  const auto job = threads_job(kRanks, world_bytes + Communicator::heap_bytes(2, 64, 4096));
  on_every_rank(kRanks, [&](int rank) {
    Communicator world(job->endpoint(rank), 0, kRanks, {.record_bytes = 64, .staging_bytes = 4096}, {});
    Communicator group(job->endpoint(rank), rank / 2 * 2, 2,
                       {.offset = world_bytes, .record_bytes = 64, .staging_bytes = 4096, .first_slot = 4},
                       {});
    EXPECT_EQ(group.rank(), rank % 2);
    EXPECT_EQ(group.world_rank(1), rank / 2 * 2 + 1);
    for (int i = 0; i < 100; ++i) {
      float x = static_cast<float>(rank), y = x;
      ASSERT_TRUE(group.all_reduce({"group", i}, &x, 1).ok());
      ASSERT_TRUE(world.all_reduce({"world", i}, &y, 1).ok());
      ASSERT_EQ(x, rank < 2 ? 1.0f : 5.0f);
      ASSERT_EQ(y, 6.0f);
    }
  });
}

TEST(GeometryHash, DependsOnEveryNumberAndOrder) {
  const int64_t a[] = {1, 2, 3}, b[] = {1, 3, 2}, c[] = {1, 2, 3, 0}, d[] = {1, 2, int64_t{3} << 32};
  EXPECT_NE(geometry_hash(a), geometry_hash(b));
  EXPECT_NE(geometry_hash(a), geometry_hash(c));
  EXPECT_NE(geometry_hash(a), geometry_hash(d));
  EXPECT_EQ(geometry_hash({}), 2166136261u);  // FNV-1a's offset basis
}

}  // namespace
}  // namespace fp4moe
