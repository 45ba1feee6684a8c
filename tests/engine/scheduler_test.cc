#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>

#include "engine/test_sequence.h"

namespace fp4moe {
namespace {

// Plans a step, checks what every step must satisfy, and appends a token to sequences at their end; ended
// ones are removed. Returns rows by id.
std::map<std::string, int64_t> run_step(Scheduler& scheduler, const SchedulerLimits& limits) {
  std::map<std::string, int64_t> rows;
  std::vector<Sequence*> at_end;
  std::map<int32_t, std::string> owner;
  int64_t num_prefill_rows = 0;
  for (const ScheduledRows& scheduled : scheduler.plan_step()) {
    Sequence& s = *scheduled.sequence;
    EXPECT_GE(scheduled.num_rows, 1);
    EXPECT_LE(scheduled.num_rows, limits.chunked_prefill_size);
    if (s.num_tokens() - s.num_cached > 1) num_prefill_rows += scheduled.num_rows;
    EXPECT_GE(static_cast<int64_t>(s.page_table.size()) * scheduler.pages().page_size(),
              s.num_cached + scheduled.num_rows);
    for (const int32_t page : s.page_table) EXPECT_TRUE(owner.emplace(page, s.id).second) << "page " << page;
    EXPECT_TRUE(rows.emplace(s.id, scheduled.num_rows).second);
    if (scheduled.reaches_end()) at_end.push_back(&s);
  }
  EXPECT_LE(num_prefill_rows, limits.max_prefill_tokens);
  EXPECT_LE(scheduler.num_running(), limits.max_running_requests);
  scheduler.commit_step();
  for (Sequence* s : at_end) {
    s->token_ids.push_back(1);
    if (s->num_tokens() == s->max_tokens) scheduler.remove(s->id);
  }
  return rows;
}

using Rows = std::map<std::string, int64_t>;

TEST(Scheduler, PrefillIsChunkedAndDecodeRunsBesideIt) {
  const SchedulerLimits limits{.max_running_requests = 4, .chunked_prefill_size = 3, .max_prefill_tokens = 5};
  Scheduler scheduler(limits, 100, 4);
  scheduler.enqueue(sequence("a", 1, 10));
  scheduler.enqueue(sequence("b", 7, 10));
  scheduler.enqueue(sequence("c", 4, 10));
  EXPECT_EQ(run_step(scheduler, limits), (Rows{{"a", 1}, {"b", 3}, {"c", 2}}));
  EXPECT_EQ(run_step(scheduler, limits), (Rows{{"a", 1}, {"b", 3}, {"c", 2}}));
  EXPECT_EQ(run_step(scheduler, limits), (Rows{{"a", 1}, {"b", 1}, {"c", 1}}));
}

TEST(Scheduler, FirstComeFirstServedAndNoMoreThanMayRun) {
  const SchedulerLimits limits{.max_running_requests = 2, .chunked_prefill_size = 8, .max_prefill_tokens = 8};
  Scheduler scheduler(limits, 100, 4);
  scheduler.enqueue(sequence("a", 1, 1));
  scheduler.enqueue(sequence("b", 1, 2));
  scheduler.enqueue(sequence("c", 1, 1));
  EXPECT_EQ(run_step(scheduler, limits), (Rows{{"a", 1}, {"b", 1}}));
  EXPECT_EQ(run_step(scheduler, limits), (Rows{{"b", 1}, {"c", 1}}));
  EXPECT_TRUE(scheduler.plan_step().empty());
}

TEST(Scheduler, ABigRequestAtTheHeadIsNotOvertaken) {
  const SchedulerLimits limits{
      .max_running_requests = 4, .chunked_prefill_size = 64, .max_prefill_tokens = 64};
  Scheduler scheduler(limits, 4, 4);
  scheduler.enqueue(sequence("a", 8, 3));
  scheduler.enqueue(sequence("big", 12, 2));
  scheduler.enqueue(sequence("small", 1, 2));
  for (int step = 0; step < 3; ++step) EXPECT_EQ(run_step(scheduler, limits).count("small"), 0u);
  EXPECT_EQ(run_step(scheduler, limits), (Rows{{"big", 12}}));
}

TEST(Scheduler, TheLastAdmittedGivesItsPagesBackAndStartsAgain) {
  const SchedulerLimits limits{
      .max_running_requests = 4, .chunked_prefill_size = 64, .max_prefill_tokens = 64};
  Scheduler scheduler(limits, 4, 2);
  scheduler.enqueue(sequence("a", 2, 6));
  scheduler.enqueue(sequence("b", 2, 6));
  int64_t num_steps = 0;
  std::vector<std::string> order;
  for (; scheduler.first(); ++num_steps) {
    const Rows rows = run_step(scheduler, limits);
    if (rows.count("b") && rows.at("b") > 2) order.push_back("b again");
  }
  EXPECT_GE(scheduler.num_retracted(), 1);
  EXPECT_EQ(order.size(), static_cast<size_t>(scheduler.num_retracted()));
  EXPECT_EQ(scheduler.pages().num_free(), 4);
}

TEST(Scheduler, RemoveTakesOutWhatWaitsAndWhatRuns) {
  const SchedulerLimits limits{.max_running_requests = 1, .chunked_prefill_size = 8, .max_prefill_tokens = 8};
  Scheduler scheduler(limits, 8, 4);
  scheduler.enqueue(sequence("a", 8, 4));
  scheduler.enqueue(sequence("b", 8, 4));
  run_step(scheduler, limits);
  EXPECT_EQ(scheduler.remove("b")->id, "b");
  EXPECT_EQ(scheduler.remove("c"), nullptr);
  EXPECT_EQ(scheduler.remove("a")->id, "a");
  EXPECT_EQ(scheduler.pages().num_free(), 8);
  EXPECT_EQ(scheduler.first(), nullptr);
}

// Every pool size that holds the largest request, every chunk and page size: all end, all pages come back.
TEST(Scheduler, AllEndWhateverThePool) {
  for (const int page_size : {1, 2, 3, 5})
    for (int64_t num_pages = (17 + page_size - 1) / page_size; num_pages <= 40; num_pages += 3)
      for (const int64_t chunk : {1, 2, 7})
        for (const int64_t max_prefill : {1, 3, 20}) {
          const SchedulerLimits limits{
              .max_running_requests = 5, .chunked_prefill_size = chunk, .max_prefill_tokens = max_prefill};
          Scheduler scheduler(limits, num_pages, page_size);
          for (int i = 0; i < 12; ++i)
            scheduler.enqueue(sequence(std::to_string(i), 1 + i * 5 % 10, 1 + i * 7 % 8));
          int num_steps = 0;
          for (; scheduler.first() && num_steps < 10000; ++num_steps) run_step(scheduler, limits);
          EXPECT_LT(num_steps, 10000);
          EXPECT_EQ(scheduler.pages().num_free(), num_pages);
        }
}

TEST(PagePool, GrowsByWholePagesAndChangesNothingWhenItCannot) {
  PagePool pool(3, 4);
  std::vector<int32_t> a, b;
  EXPECT_TRUE(pool.grow(a, 0));
  EXPECT_TRUE(pool.grow(a, 5));
  EXPECT_EQ(a.size(), 2u);
  EXPECT_TRUE(pool.grow(a, 8));
  EXPECT_EQ(a.size(), 2u);
  EXPECT_FALSE(pool.grow(b, 5));
  EXPECT_TRUE(b.empty());
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_TRUE(pool.grow(b, 4));
  pool.release(a);
  pool.release(b);
  EXPECT_EQ(pool.num_free(), 3);
}

TEST(PagePoolDeathTest, DoubleFreeForeignPageAndLeakAreCaught) {
  EXPECT_DEATH(
      {
        PagePool pool(3, 4);
        std::vector<int32_t> table;
        pool.grow(table, 4);
        std::vector<int32_t> copy = table;
        pool.release(table);
        pool.release(copy);
      },
      "is not taken");
  EXPECT_DEATH(
      {
        PagePool pool(3, 4);
        std::vector<int32_t> table = {3};
        pool.release(table);
      },
      "KV page 3 of 3");
  EXPECT_DEATH(
      {
        PagePool pool(3, 4);
        std::vector<int32_t> table;
        pool.grow(table, 4);
      },
      "leaked KV pages: 2 of 3");
}

}  // namespace
}  // namespace fp4moe
