// Steps over thread ranks whose "model" sums each group's batch over all ranks.
#include "engine/ranks/step_runner.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <new>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "comm/communicator.h"

namespace fp4moe {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
constexpr int64_t kVocab = 8;

// Logits of row r, column v: (sum of all groups' ids) * 100 + id of the row + v. They are wrong unless every
// rank takes part with its own group's batch.
struct SumModel {
  SumModel(Job& job, const RankLayout& rank_layout, std::chrono::nanoseconds timeout, uint32_t first_signal)
      : layout(rank_layout) {
    const CommRegion region{.record_bytes = 64, .staging_bytes = 1024};
    for (int rank = 0; rank < layout.tp; ++rank)
      world.push_back(std::make_unique<Communicator>(job.endpoint(rank), 0, layout.tp, region,
                                                     CommOptions{timeout, first_signal + 1}));
  }

  Status forward(int rank, const Batch& batch, float* logits) {
    if (before) before(rank);
    float sum = 0;
    if (rank % layout.attention_tp() == 0)
      sum = std::accumulate(batch.token_ids.begin(), batch.token_ids.end(), 0.0f);
    const Status status = world[static_cast<size_t>(rank)]->all_reduce({"sum", 3}, &sum, 1);
    if (after) after(rank);
    if (!status.ok() || logits == nullptr) return status;
    for (const int64_t row : batch.logit_rows)
      for (int64_t v = 0; v < kVocab; ++v)
        *logits++ = sum * 100 + static_cast<float>(batch.token_ids[static_cast<size_t>(row)] + v);
    return {};
  }

  RankLayout layout;
  std::vector<std::unique_ptr<Communicator>> world;
  std::function<void(int rank)> before, after;  // set before start()
};

// One sequence per group that has token ids, with one row per id; every row has logits.
struct Step {
  explicit Step(std::vector<std::vector<int32_t>> group_ids) : ids(std::move(group_ids)) {
    tables.resize(ids.size(), {0, 1});
    for (size_t g = 0; g < ids.size(); ++g) {
      std::vector<int64_t> rows(ids[g].size());
      std::iota(rows.begin(), rows.end(), 0);
      positions.push_back(rows);
      sequences.emplace_back();
      if (!rows.empty()) sequences[g].push_back({0, static_cast<int64_t>(rows.size()), 0, tables[g]});
      batches.push_back({ids[g], positions[g], sequences[g], positions[g]});
    }
  }
  Step(const Step&) = delete;

  std::vector<float> want() const {
    float sum = 0;
    for (const auto& group : ids) sum = std::accumulate(group.begin(), group.end(), sum);
    std::vector<float> logits;
    for (const auto& group : ids)
      for (const int32_t id : group)
        for (int64_t v = 0; v < kVocab; ++v) logits.push_back(sum * 100 + static_cast<float>(id + v));
    return logits;
  }

  std::vector<std::vector<int32_t>> ids, tables;
  std::vector<std::vector<int64_t>> positions;
  std::vector<std::vector<SequenceRows>> sequences;
  std::vector<Batch> batches;
};

class Ranks {
 public:
  Ranks(int tp, int dp, double timeout_seconds = 10, uint32_t first_signal = 0) {
    auto job = Job::open({.fabric = "threads",
                          .num_ranks = tp,
                          .heap_bytes = Communicator::heap_bytes(tp, 64, 1024),
                          .timeout_seconds = timeout_seconds,
                          .first_signal = first_signal});
    EXPECT_TRUE(job.ok()) << job.status().to_string();
    job_ = std::move(*job);
    const RankLayout layout{.tp = tp, .dp = dp};
    const auto timeout =
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(timeout_seconds));
    model = std::make_unique<SumModel>(*job_, layout, timeout, first_signal);
    const StepRunnerOptions options{.layout = layout,
                                    .limits = {.num_groups = dp,
                                               .max_batch_tokens = 8,
                                               .max_logit_rows = 8 * dp,
                                               .num_kv_pages = 2,
                                               .max_table_pages = 2,
                                               .page_size = 4,
                                               .vocab_size = kVocab},
                                    .timeout = timeout,
                                    .first_signal = first_signal};
    runner = std::make_unique<StepRunner>(
        *job_, options,
        [this](int rank, const Batch& batch, float* out) { return model->forward(rank, batch, out); },
        [this](int rank, const std::string& text) { return task(rank, text); });
  }
  ~Ranks() { runner.reset(); }

  std::vector<float> run(const Step& step) {
    logits.assign(step.want().size(), -1);
    const Status status = runner->run_on_ranks(step.batches, logits.data());
    EXPECT_TRUE(status.ok()) << status.to_string();
    return logits;
  }
  Status try_run(const Step& step) {
    logits.assign(step.want().size(), -1);
    return runner->run_on_ranks(step.batches, logits.data());
  }

 private:
  std::unique_ptr<Job> job_;

 public:
  std::vector<float> logits;
  std::unique_ptr<SumModel> model;
  std::function<Status(int rank, const std::string& text)> task;
  std::unique_ptr<StepRunner> runner;
};

TEST(StepRunner, EveryRankRunsItsGroupsBatch) {
  for (const auto& [tp, dp] : {std::pair{2, 1}, {2, 2}, {4, 2}, {4, 4}, {8, 4}}) {
    Ranks ranks(tp, dp);
    ASSERT_TRUE(ranks.runner->start().ok());
    for (int32_t i = 0; i < 50; ++i) {
      std::vector<std::vector<int32_t>> ids(static_cast<size_t>(dp));
      for (size_t g = 0; g < ids.size(); ++g)
        for (int32_t n = 0; n < (i + static_cast<int32_t>(g)) % 4; ++n) ids[g].push_back((i + n) % 7);
      const Step step(ids);
      EXPECT_EQ(ranks.run(step), step.want()) << tp << " ranks, " << dp << " groups, step " << i;
    }
  }
}

// Rank 2 takes longer than the time limit of a step.
TEST(StepRunner, ATaskRunsOnEveryRankBetweenSteps) {
  Ranks ranks(4, 2, /*timeout_seconds=*/0.2);
  std::atomic<int> sum{0};
  ranks.task = [&](int rank, const std::string& text) -> Status {
    if (rank == 2) std::this_thread::sleep_for(400ms);
    EXPECT_EQ(text, "task");
    sum += 1 + rank;
    return {};
  };
  ASSERT_TRUE(ranks.runner->start().ok());
  const Step step({{1, 2}, {3}});
  for (int i = 1; i <= 2; ++i) {
    EXPECT_EQ(ranks.run(step), step.want());
    EXPECT_TRUE(ranks.runner->run_task("task").ok());
    EXPECT_EQ(sum, i * (1 + 2 + 3 + 4));
  }
  EXPECT_EQ(ranks.run(step), step.want());
  EXPECT_EQ(ranks.runner->run_task(std::string(1 << 20, 'a')).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(ranks.run(step), step.want());
}

TEST(StepRunner, AFailedTaskEndsTheJobByName) {
  for (const int failing : {0, 1, 3}) {
    Ranks ranks(4, 2);
    ranks.task = [&](int rank, const std::string&) -> Status {
      return rank == failing ? data_loss("no weights") : Status();
    };
    ASSERT_TRUE(ranks.runner->start().ok());
    const std::string name = "rank " + std::to_string(failing) + ": no weights";
    for (const Status& status : {ranks.runner->run_task("task"), ranks.runner->run_task("task"),
                                 ranks.try_run(Step({{1}, {1}})), ranks.runner->failure()})
      EXPECT_NE(status.message().find(name), std::string::npos) << status.to_string();
  }
}

TEST(StepRunner, IdleGroupsAndIdleSteps) {
  Ranks ranks(4, 4);
  ASSERT_TRUE(ranks.runner->start().ok());
  for (const Step& step : {Step({{1}, {}, {}, {}}), Step({{}, {}, {}, {5, 6}}), Step({{}, {}, {}, {}}),
                           Step({{}, {2}, {}, {}}), Step({{1}, {1}, {1}, {1}})})
    EXPECT_EQ(ranks.run(step), step.want());
}

TEST(StepRunner, CountsWrap) {
  Ranks ranks(2, 2, 10, 0xfffffffdu);
  ASSERT_TRUE(ranks.runner->start().ok());
  for (int i = 0; i < 8; ++i) {
    const Step step({{i}, {1}});
    EXPECT_EQ(ranks.run(step), step.want());
  }
}

TEST(StepRunner, WaitsWithoutADeadlineBetweenSteps) {
  Ranks ranks(4, 2, 0.2);
  ASSERT_TRUE(ranks.runner->start().ok());
  const Step step({{1}, {2}});
  EXPECT_EQ(ranks.run(step), step.want());
  std::this_thread::sleep_for(500ms);
  EXPECT_EQ(ranks.run(step), step.want());
}

TEST(StepRunner, EndsWithoutAStepAndWithoutAStart) {
  { Ranks never_started(2, 1); }
  Ranks ranks(4, 1);
  EXPECT_TRUE(ranks.runner->start().ok());
}

TEST(StepRunner, ARankThatIsLateWithinTheDeadlineIsWaitedFor) {
  Ranks ranks(4, 4, 1.0);
  std::atomic<int> calls = 0;
  ranks.model->before = [&](int rank) {
    if (rank == 2 && calls++ == 1) std::this_thread::sleep_for(500ms);
  };
  ASSERT_TRUE(ranks.runner->start().ok());
  for (int i = 0; i < 3; ++i) {
    const Step step({{1}, {2}, {3}, {i}});
    EXPECT_EQ(ranks.run(step), step.want());
  }
}

// A stalled rank: the step fails in time; the error names the rank and the operation, and is permanent.
TEST(StepRunner, AStalledRankFailsTheJobByName) {
  Ranks ranks(4, 4, 0.3);
  ranks.model->before = [](int rank) {
    if (rank == 2) std::this_thread::sleep_for(1500ms);
  };
  ASSERT_TRUE(ranks.runner->start().ok());
  const Step step({{1}, {2}, {3}, {4}});
  const auto begin = Clock::now();
  const Status status = ranks.try_run(step);
  EXPECT_LT(Clock::now() - begin, 1300ms);
  EXPECT_EQ(status.code(), StatusCode::kDeadline) << status.to_string();
  EXPECT_NE(status.message().find("rank 2"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("sum"), std::string::npos) << status.message();
  EXPECT_EQ(ranks.try_run(step).message(), status.message());
  EXPECT_EQ(ranks.runner->failure().message(), status.message());
}

// If a rank stalls after its last exchange with other ranks, only rank 0 waits for it.
TEST(StepRunner, ARankThatNeverEndsAStepIsNamed) {
  Ranks ranks(2, 2, 0.3);
  ranks.model->after = [](int rank) {
    if (rank == 1) std::this_thread::sleep_for(1s);
  };
  ASSERT_TRUE(ranks.runner->start().ok());
  const Status status = ranks.try_run(Step({{1}, {2}}));
  EXPECT_EQ(status.code(), StatusCode::kDeadline);
  EXPECT_EQ(status.message(),
            "op step 1 on rank 0: rank 0 waited 0.300000 s for rank 1 at the end of step 1 (op step_end: "
            "expected 2, seen 1)");
}

TEST(StepRunner, AnExceptionOnARankIsTheJobsError) {
  for (const int bad_rank : {0, 3}) {
    Ranks ranks(4, 2, 5);
    ranks.model->before = [bad_rank](int rank) {
      if (rank == bad_rank) throw std::bad_alloc();
    };
    ASSERT_TRUE(ranks.runner->start().ok());
    const auto begin = Clock::now();
    const Status status = ranks.try_run(Step({{1}, {2}}));
    EXPECT_LT(Clock::now() - begin, 2s);  // other ranks see the failure at once
    EXPECT_NE(status.message().find("rank " + std::to_string(bad_rank)), std::string::npos)
        << status.message();
  }
}

}  // namespace
}  // namespace fp4moe
