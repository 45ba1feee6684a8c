#include "model/column_gather.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "comm/job.h"

namespace fp4moe {
namespace {

constexpr int64_t kRecordBytes = 4096, kStagingBytes = 256;  // small, so that operands are sent in pieces

// All ranks gather `rows` rows of the parts; element (r, c) is r * 1000 + c. True if every rank has all
// elements.
testing::AssertionResult gathers(const std::vector<Shard>& parts, int64_t num_rows) {
  const int ranks = static_cast<int>(parts.size());
  const int64_t cols = parts.back().first + parts.back().count;
  JobOptions options;
  options.fabric = "threads";
  options.num_ranks = ranks;
  options.heap_bytes = Communicator::heap_bytes(ranks, kRecordBytes, kStagingBytes);
  auto job = Job::open(options);
  if (!job.ok()) return testing::AssertionFailure() << job.status().to_string();
  std::vector<std::string> problems(parts.size());
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      Communicator group((*job)->endpoint(r), 0, ranks, {0, kRecordBytes, kStagingBytes, 0}, {});
      ThreadPool pool(2);
      const ColumnGather gather(group, parts, 4);
      const Shard mine = gather.mine();
      std::vector<float> in(static_cast<size_t>(num_rows * mine.count)),
          out(static_cast<size_t>(num_rows * cols));
      for (int64_t i = 0; i < std::ssize(in); ++i)
        in[static_cast<size_t>(i)] = static_cast<float>(i / mine.count * 1000 + mine.first + i % mine.count);
      auto scratch = Arena::make(gather.scratch_bytes(num_rows) + 64);
      const Status status = gather.run({"test"}, {num_rows, in.data(), out.data()}, *scratch, pool);
      if (!status.ok()) problems[static_cast<size_t>(r)] = status.to_string();
      for (int64_t i = 0; status.ok() && i < std::ssize(out); ++i)
        if (out[static_cast<size_t>(i)] != static_cast<float>(i / cols * 1000 + i % cols))
          problems[static_cast<size_t>(r)] = "element " + std::to_string(i);
      if (scratch->used_bytes() != 0) problems[static_cast<size_t>(r)] = "scratch is kept";
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& problem : problems)
    if (!problem.empty()) return testing::AssertionFailure() << problem;
  return testing::AssertionSuccess();
}

TEST(ColumnGather, GathersEvenAndUnevenParts) {
  EXPECT_TRUE(gathers({{0, 32}, {32, 32}}, 7));
  EXPECT_TRUE(gathers({{0, 32}, {32, 16}, {48, 16}, {64, 3}}, 19));
  EXPECT_TRUE(gathers({{0, 16}, {16, 5}, {21, 0}, {21, 0}}, 3));  // ranks without a column
  EXPECT_TRUE(gathers({{0, 1}, {1, 1}}, 0));
}

// Output shards cover all outputs, in whole panels except the last.
TEST(OutputShard, CoversAllOutputsInPanels) {
  for (const int64_t outputs : {1, 15, 16, 17, 96, 100, 201088})
    for (const int64_t parts : {1, 2, 3, 4, 8}) {
      int64_t next = 0;
      for (int64_t i = 0; i < parts; ++i) {
        const Shard shard = output_shard(outputs, parts, i);
        EXPECT_EQ(shard.first, next);
        next += shard.count;
        EXPECT_TRUE(next == outputs || next % 16 == 0) << outputs << " over " << parts;
      }
      EXPECT_EQ(next, outputs);
    }
}

}  // namespace
}  // namespace fp4moe
