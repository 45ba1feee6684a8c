#include "engine/schedule/scheduler.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>

#include "engine/test_sequence.h"

namespace fp4moe {
namespace {

// The rows have window pages for themselves and their windows, but no more than they need.
void expect_window(const Scheduler& scheduler, const ScheduledRows& scheduled) {
  const KvWindow& window = scheduler.pages().window();
  const SequenceKv& kv = scheduled.sequence->kv;
  const int64_t end = kv.num_cached + scheduled.num_rows, size = window.page_size;
  EXPECT_LE(kv.tables.first_window * size, std::max<int64_t>(0, kv.num_cached - window.tokens + 1));
  EXPECT_GE(std::ssize(kv.tables.window) * size, end);
  EXPECT_LE(kv.tables.num_window_pages(), window.most_pages(scheduled.num_rows));
  EXPECT_LE(kv.tables.window.size(), kv.tables.full.size());
}

// Plans a step, checks its invariants, appends a token to the sequences whose rows reach their end, and
// removes ended sequences. Returns the number of rows by id.
std::map<std::string, int64_t> run_step(Scheduler& scheduler, const SchedulerLimits& limits) {
  std::map<std::string, int64_t> rows;
  std::vector<Sequence*> at_end;
  std::map<int32_t, std::string> owner;
  int64_t num_prefill_rows = 0;
  for (const ScheduledRows& scheduled : scheduler.plan_step()) {
    Sequence& s = *scheduled.sequence;
    EXPECT_GE(scheduled.num_rows, 1);
    EXPECT_LE(scheduled.num_rows, limits.chunked_prefill_size);
    if (s.num_tokens() - s.kv.num_cached > 1) num_prefill_rows += scheduled.num_rows;
    EXPECT_GE(static_cast<int64_t>(s.kv.tables.full.size()) * scheduler.pages().page_size(),
              s.kv.num_cached + scheduled.num_rows);
    if (scheduler.pages().has_window()) expect_window(scheduler, scheduled);
    for (size_t i = static_cast<size_t>(s.kv.num_published_pages); i < s.kv.tables.full.size(); ++i)
      EXPECT_TRUE(owner.emplace(s.kv.tables.full[i], s.id).second) << "page " << s.kv.tables.full[i];
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
  Scheduler scheduler(limits, {100, 4});
  scheduler.enqueue(sequence("a", 1, 10));
  scheduler.enqueue(sequence("b", 7, 10));
  scheduler.enqueue(sequence("c", 4, 10));
  EXPECT_EQ(run_step(scheduler, limits), (Rows{{"a", 1}, {"b", 3}, {"c", 2}}));
  EXPECT_EQ(run_step(scheduler, limits), (Rows{{"a", 1}, {"b", 3}, {"c", 2}}));
  EXPECT_EQ(run_step(scheduler, limits), (Rows{{"a", 1}, {"b", 1}, {"c", 1}}));
}

TEST(Scheduler, FirstComeFirstServedAndNoMoreThanMayRun) {
  const SchedulerLimits limits{.max_running_requests = 2, .chunked_prefill_size = 8, .max_prefill_tokens = 8};
  Scheduler scheduler(limits, {100, 4});
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
  Scheduler scheduler(limits, {4, 4});
  scheduler.enqueue(sequence("a", 8, 3));
  scheduler.enqueue(sequence("big", 12, 2));
  scheduler.enqueue(sequence("small", 1, 2));
  for (int step = 0; step < 3; ++step) EXPECT_EQ(run_step(scheduler, limits).count("small"), 0u);
  EXPECT_EQ(run_step(scheduler, limits), (Rows{{"big", 12}}));
}

TEST(Scheduler, TheLastAdmittedGivesItsPagesBackAndStartsAgain) {
  const SchedulerLimits limits{
      .max_running_requests = 4, .chunked_prefill_size = 64, .max_prefill_tokens = 64, .conservativeness = 0};
  Scheduler scheduler(limits, {4, 2});
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
  Scheduler scheduler(limits, {8, 4});
  scheduler.enqueue(sequence("a", 8, 4));
  scheduler.enqueue(sequence("b", 8, 4));
  run_step(scheduler, limits);
  EXPECT_EQ(scheduler.remove("b")->id, "b");
  EXPECT_EQ(scheduler.remove("c"), nullptr);
  EXPECT_EQ(scheduler.remove("a")->id, "a");
  EXPECT_EQ(scheduler.pages().num_free(), 8);
  EXPECT_EQ(scheduler.first(), nullptr);
}

// For every pool size that holds the largest request, and every chunk and page size, all requests end and all
// pages are returned.
TEST(Scheduler, AllEndWhateverThePool) {
  for (const int page_size : {1, 2, 3, 5})
    for (int64_t num_pages = (17 + page_size - 1) / page_size; num_pages <= 40; num_pages += 3)
      for (const int64_t chunk : {1, 2, 7})
        for (const int64_t max_prefill : {1, 3, 20}) {
          const SchedulerLimits limits{.max_running_requests = 5,
                                       .chunked_prefill_size = chunk,
                                       .max_prefill_tokens = max_prefill,
                                       .conservativeness = num_pages % 2 == 0 ? 0.0 : 1.0};
          // As many window pages as full ones never run out first.
          const int64_t num_window_pages = num_pages % 4 == 0 ? num_pages : 0;
          Scheduler scheduler(limits, {num_pages, page_size, num_window_pages, num_window_pages > 0 ? 3 : 0});
          for (int i = 0; i < 12; ++i)
            scheduler.enqueue(sequence(std::to_string(i), 1 + i * 5 % 10, 1 + i * 7 % 8));
          int num_steps = 0;
          for (; scheduler.first() && num_steps < 10000; ++num_steps) run_step(scheduler, limits);
          EXPECT_LT(num_steps, 10000);
          EXPECT_EQ(scheduler.pages().num_free(), num_pages);
        }
}

// ---- fairness -------------------------------------------------------------------------------------

TEST(Scheduler, AShortPromptDoesNotWaitForALongOneNorHoldItUp) {
  const SchedulerLimits limits{.max_running_requests = 8, .chunked_prefill_size = 8, .max_prefill_tokens = 8};
  Scheduler scheduler(limits, {400, 4});
  scheduler.enqueue(sequence("long", 800, 1));
  EXPECT_EQ(run_step(scheduler, limits), (Rows{{"long", 8}}));
  scheduler.enqueue(sequence("longer", 700, 1));
  EXPECT_EQ(run_step(scheduler, limits), (Rows{{"long", 4}, {"longer", 4}}));
  scheduler.enqueue(sequence("short", 6, 1));
  EXPECT_EQ(run_step(scheduler, limits), (Rows{{"long", 4}, {"short", 4}}));
  EXPECT_EQ(run_step(scheduler, limits), (Rows{{"long", 4}, {"longer", 2}, {"short", 2}}));
  // However many short prompts arrive, the long one gets half of every step.
  int64_t num_rows = 0;
  for (int step = 0; step < 20; ++step) {
    scheduler.enqueue(sequence("short " + std::to_string(step), 8, 1));
    num_rows += run_step(scheduler, limits)["long"];
  }
  EXPECT_GE(num_rows, 20 * 4);
  while (scheduler.first()) run_step(scheduler, limits);
}

TEST(Scheduler, RoomIsKeptForTheAnswersToCome) {
  const SchedulerLimits limits{
      .max_running_requests = 8, .chunked_prefill_size = 64, .max_prefill_tokens = 64};
  Scheduler scheduler(limits, {32, 1});
  for (const char* id : {"a", "b", "c"}) scheduler.enqueue(sequence(id, 4, 10));
  EXPECT_EQ(run_step(scheduler, limits),
            (Rows{{"a", 4}, {"b", 4}}));  // each reserves 4 + 7 tokens, so a third request does not fit
  while (scheduler.first()) run_step(scheduler, limits);
  EXPECT_EQ(scheduler.num_retracted(), 0);
}

// The same with window layers: from window pages for one sequence to more than are ever needed, all requests
// end, all pages are returned, and only the full pages are a reason to retract.
TEST(Scheduler, AllEndWhateverTheWindowPool) {
  for (const int page_size : {1, 2, 3, 5})
    for (const int64_t window : {1, 2, 4, 7, 30})
      for (const int64_t surplus : {0, 1, 3, 50})
        for (const int64_t chunk : {1, 2, 7})
          for (const bool reuses : {false, true}) {
            const SchedulerLimits limits{.max_running_requests = 5,
                                         .chunked_prefill_size = chunk,
                                         .max_prefill_tokens = 20,
                                         .reuses_prefixes = reuses,
                                         .conservativeness = 0};
            const int64_t least = std::min<int64_t>(KvWindow{window, page_size}.most_pages(1), 200);
            Scheduler scheduler(limits, {200, page_size, least + surplus, window});
            for (int i = 0; i < 12; ++i)
              scheduler.enqueue(sequence(std::to_string(i), 1 + i * 5 % 23, 1 + i * 7 % 19));
            int num_steps = 0;
            for (; scheduler.first() && num_steps < 10000; ++num_steps) {
              run_step(scheduler, limits);
              ASSERT_EQ(scheduler.num_leaked_pages(), 0);
            }
            EXPECT_LT(num_steps, 10000);
            EXPECT_EQ(scheduler.num_retracted(), 0);
            EXPECT_EQ(scheduler.pages().num_available(), 200);
            EXPECT_EQ(scheduler.pages().window_pages().num_available(), least + surplus);
          }
}

// A long sequence has few window pages at a time; with full pages for 200 tokens, window pages for 9 are
// enough.
TEST(Scheduler, ALongSequenceHasFewWindowPages) {
  const SchedulerLimits limits{.max_running_requests = 4, .chunked_prefill_size = 8, .max_prefill_tokens = 8};
  Scheduler scheduler(limits, {100, 2, 8, 5});  // 3 pages each in decode
  scheduler.enqueue(sequence("long", 150, 30));
  scheduler.enqueue(sequence("short", 20, 30));
  int64_t most = 0;
  int num_steps = 0;
  for (; scheduler.first() && num_steps < 1000; ++num_steps) {
    run_step(scheduler, limits);
    if (const Sequence* s = scheduler.find("long"); s != nullptr && s->num_tokens() > 150)
      most = std::max(most, s->kv.tables.num_window_pages());
  }
  EXPECT_LT(num_steps, 1000);
  EXPECT_EQ(most, 3);
}

TEST(NewTokenRatio, DecaysLearnsFromRetractionAndStartsAgain) {
  NewTokenRatio ratio(1);
  EXPECT_EQ(ratio.expected_tokens(10), 7);
  EXPECT_EQ(ratio.expected_tokens(1'000'000), 2868) << "at most 4096 tokens count";
  for (int step = 0; step < 1000; ++step) ratio.decay();
  EXPECT_NEAR(ratio.value(), 0.098, 1e-9);
  ratio.learn(2, 60, 200);
  EXPECT_NEAR(ratio.value(), 100.0 / 201, 1e-9);
  ratio.learn(100, 0, 10);
  EXPECT_EQ(ratio.value(), 1);
  ratio.reset();
  EXPECT_NEAR(ratio.value(), 0.7, 1e-9);
  NewTokenRatio none(0);
  none.learn(2, 60, 200);
  EXPECT_EQ(none.expected_tokens(100), 0);
  EXPECT_EQ(NewTokenRatio(5).expected_tokens(100), 100);
}

// ---- reuse of prefixes ----------------------------------------------------------------------------

constexpr SchedulerLimits kReusing{.max_running_requests = 4,
                                   .chunked_prefill_size = 64,
                                   .max_prefill_tokens = 64,
                                   .reuses_prefixes = true,
                                   .conservativeness = 0};

std::unique_ptr<Sequence> sequence_of(const std::string& id, std::vector<int32_t> prompt,
                                      int64_t num_output_tokens) {
  auto made = sequence(id, std::ssize(prompt), num_output_tokens);
  made->token_ids = std::move(prompt);
  return made;
}

TEST(Scheduler, ThePrefixOfAPastRequestIsNotComputedAgain) {
  Scheduler scheduler(kReusing, {16, 4});
  scheduler.enqueue(sequence_of("a", {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, 1));
  EXPECT_EQ(run_step(scheduler, kReusing), (Rows{{"a", 10}}));
  EXPECT_EQ(scheduler.pages().num_cached(), 2);
  scheduler.enqueue(sequence_of("b", {1, 2, 3, 4, 5, 6, 7, 8, 9, 11}, 1));  // two whole pages
  scheduler.enqueue(sequence_of("c", {1, 2, 3, 4, 5, 6, 7, 9, 9}, 1));      // one
  scheduler.enqueue(sequence_of("d", {1, 2, 3, 4, 5, 6, 7, 8}, 1));         // its last token is computed
  scheduler.enqueue(sequence_of("e", {2, 2, 3, 4, 5, 6, 7, 8, 9}, 1));      // none
  EXPECT_EQ(run_step(scheduler, kReusing), (Rows{{"b", 2}, {"c", 5}, {"d", 4}, {"e", 9}}));
  EXPECT_EQ(scheduler.pages().num_available(), 16);
  EXPECT_EQ(scheduler.num_leaked_pages(), 0);
}

TEST(Scheduler, AnAnswerIsPartOfTheNextPrompt) {
  Scheduler scheduler(kReusing, {16, 4});
  scheduler.enqueue(sequence_of("turn 1", {5, 5, 5}, 6));  // the output is all ones
  while (scheduler.first()) run_step(scheduler, kReusing);
  scheduler.enqueue(sequence_of("turn 2", {5, 5, 5, 1, 1, 1, 1, 1, 1, 7}, 1));
  EXPECT_EQ(scheduler.plan_step().front().num_rows, 2);
  EXPECT_EQ(scheduler.first()->kv.num_reused, 8);
  run_step(scheduler, kReusing);
}

TEST(Scheduler, ARequestWaitsForThePromptItBeginsLike) {
  const SchedulerLimits limits{.max_running_requests = 4,
                               .chunked_prefill_size = 4,
                               .max_prefill_tokens = 64,
                               .reuses_prefixes = true};
  Scheduler scheduler(limits, {32, 4});
  const std::vector<int32_t> prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  scheduler.enqueue(sequence_of("a", prompt, 2));
  scheduler.enqueue(sequence_of("b", prompt, 2));
  EXPECT_EQ(run_step(scheduler, limits), (Rows{{"a", 4}}));
  EXPECT_EQ(run_step(scheduler, limits), (Rows{{"a", 4}}));
  EXPECT_EQ(run_step(scheduler, limits), (Rows{{"a", 1}, {"b", 1}}));
  while (scheduler.first()) run_step(scheduler, limits);
  EXPECT_EQ(scheduler.pages().num_cached(), 2);  // both requests share these pages
}

TEST(Scheduler, OfAFailedRequestNothingIsReused) {
  Scheduler scheduler(kReusing, {16, 4});
  scheduler.enqueue(sequence_of("a", {1, 2, 3, 4, 5, 6, 7, 8, 9}, 5));
  run_step(scheduler, kReusing);
  scheduler.remove("a", /*failed=*/true);
  EXPECT_EQ(scheduler.pages().num_cached(), 0);
  EXPECT_EQ(scheduler.pages().num_free(), 16);
}

TEST(Scheduler, ARetractedRequestFindsItsPagesAgain) {
  Scheduler scheduler(kReusing, {8, 2});
  scheduler.enqueue(sequence_of("a", {1, 2, 3, 4}, 8));
  scheduler.enqueue(sequence_of("b", {5, 6, 7, 8}, 8));
  int64_t most_again = 0;
  while (scheduler.first()) {
    const Rows rows = run_step(scheduler, kReusing);
    if (scheduler.num_retracted() > 0 && rows.count("b")) most_again = std::max(most_again, rows.at("b"));
  }
  EXPECT_EQ(scheduler.num_retracted(), 1);
  EXPECT_EQ(most_again, 5) << "4 of its 9 tokens are still in cached pages";
  EXPECT_EQ(scheduler.num_leaked_pages(), 0);
}

}  // namespace
}  // namespace fp4moe
