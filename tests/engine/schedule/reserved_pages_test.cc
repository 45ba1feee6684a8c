// Sequences that reserve pages before they are enqueued: they get what admission would give them, and never
// take anything from others.
#include <gtest/gtest.h>

#include "engine/schedule/dp_scheduler.h"
#include "engine/test_sequence.h"

namespace fp4moe {
namespace {

constexpr SchedulerLimits kLimits{
    .max_running_requests = 3, .chunked_prefill_size = 16, .max_prefill_tokens = 32};

// A pending sequence of a decode engine.
std::unique_ptr<Sequence> awaiting(const std::string& id, int64_t num_prompt_tokens,
                                   int64_t num_output_tokens) {
  auto made = sequence(id, num_prompt_tokens, num_output_tokens);
  made->disagg.awaits_pages = true;
  return made;
}

// Plans and commits a step; every sequence whose rows reach its end gets a token.
void run_step(DpScheduler& scheduler) {
  scheduler.plan_step();
  std::vector<Sequence*> at_end;
  for (int group = 0; group < scheduler.num_groups(); ++group)
    for (const ScheduledRows& rows : scheduler.step(group))
      if (rows.reaches_end()) at_end.push_back(rows.sequence);
  scheduler.commit_step();
  for (Sequence* s : at_end) s->token_ids.push_back(1);
  EXPECT_EQ(scheduler.num_leaked_pages(), 0);
}

// The first token, and then all pages, have arrived.
Sequence& start(DpScheduler& scheduler, std::unique_ptr<Sequence> owned) {
  Sequence& sequence = *owned;
  sequence.token_ids.push_back(1);
  scheduler.enqueue(std::move(owned));
  sequence.kv.num_cached = sequence.num_prompt_tokens;
  sequence.disagg.awaits_pages = false;
  return sequence;
}

TEST(ReservedPages, AreThoseOfThePromptAndSkipTheQueue) {
  DpScheduler scheduler(1, kLimits, {10, 4});
  scheduler.plan_step();
  auto early = awaiting("early", 9, 5);
  ASSERT_TRUE(scheduler.reserve(*early));
  EXPECT_EQ(early->kv.tables.full.size(), 3u);
  EXPECT_EQ(scheduler.num_reserved(), 1);
  EXPECT_EQ(scheduler.num_running(), 0);
  EXPECT_EQ(scheduler.num_used_pages(), 3);
  EXPECT_EQ(scheduler.num_leaked_pages(), 0);
  EXPECT_EQ(scheduler.first(), nullptr);
  const std::vector<int32_t> pages = early->kv.tables.full;
  const Sequence& runs = start(scheduler, std::move(early));
  EXPECT_EQ(scheduler.num_reserved(), 0);
  EXPECT_EQ(scheduler.num_running(), 1);
  run_step(scheduler);
  EXPECT_EQ(runs.kv.num_cached, 10);
  EXPECT_EQ(runs.kv.tables.full, pages);
  EXPECT_NE(scheduler.remove("early"), nullptr);
  EXPECT_EQ(scheduler.num_used_pages(), 0);
}

// A request that is cancelled or fails before its first token.
TEST(ReservedPages, OfASequenceThatEndsAreFree) {
  DpScheduler scheduler(2, kLimits, {10, 4});
  scheduler.plan_step();
  for (const bool failed : {false, true}) {
    auto early = awaiting("early", 9, 5);
    ASSERT_TRUE(scheduler.reserve(*early));
    scheduler.enqueue(std::move(early));
    EXPECT_NE(scheduler.remove("early", failed), nullptr);
    EXPECT_EQ(scheduler.num_used_pages(), 0);
    EXPECT_EQ(scheduler.num_cached_pages(), 0) << "pages without content were published";
    EXPECT_EQ(scheduler.num_leaked_pages(), 0);
  }
}

TEST(ReservedPages, AreNotMoreThanAdmissionWouldGive) {
  DpScheduler scheduler(1, kLimits, {10, 4});
  scheduler.plan_step();
  auto big = awaiting("big", 41, 2), first = awaiting("first", 20, 2), second = awaiting("second", 17, 2);
  EXPECT_FALSE(scheduler.reserve(*big)) << "11 pages of 10";
  EXPECT_TRUE(scheduler.reserve(*first));
  EXPECT_FALSE(scheduler.reserve(*second)) << "it leaves no page to grow";
  EXPECT_TRUE(second->kv.tables.full.empty());
  std::vector<std::unique_ptr<Sequence>> small;
  for (int i = 0; i < 3; ++i) small.push_back(awaiting("small", 1, 1));
  EXPECT_TRUE(scheduler.reserve(*small[0]));
  EXPECT_TRUE(scheduler.reserve(*small[1]));
  EXPECT_FALSE(scheduler.reserve(*small[2])) << "the fourth of three requests";
  for (auto* early : {&first, &small[0], &small[1]}) {
    (*early)->id = "x";
    scheduler.enqueue(std::move(*early));
    scheduler.remove("x");
  }
  EXPECT_EQ(scheduler.num_used_pages(), 0);
}

TEST(ReservedPages, AreNotGivenWhileOthersWait) {
  DpScheduler scheduler(1, kLimits, {10, 4});
  scheduler.enqueue(sequence("a", 29, 2));
  scheduler.enqueue(sequence("b", 29, 2));
  run_step(scheduler);
  auto early = awaiting("early", 1, 1);
  EXPECT_FALSE(scheduler.reserve(*early));
  scheduler.remove("b");
  EXPECT_TRUE(scheduler.reserve(*early));
  start(scheduler, std::move(early));
  for (const char* id : {"a", "early"}) scheduler.remove(id);
}

// A sequence that waits gets a reservation's pages or place, the last one first.
TEST(ReservedPages, AreGivenBackToASequenceThatWaits) {
  for (const bool wants_place : {false, true}) {
    DpScheduler scheduler(1, kLimits, {10, 4});
    scheduler.plan_step();
    auto first = awaiting("first", 8, 2), second = awaiting("second", 8, 2), third = awaiting("third", 4, 2);
    for (auto* early : {&first, &second, &third}) ASSERT_TRUE(scheduler.reserve(**early));
    scheduler.enqueue(sequence("waits", wants_place ? 1 : 17, 4));
    run_step(scheduler);
    EXPECT_EQ(scheduler.num_running(), 1);
    EXPECT_EQ(scheduler.num_retracted(), 0);
    EXPECT_TRUE(third->kv.tables.full.empty());
    EXPECT_FALSE(third->disagg.awaits_pages);
    EXPECT_EQ(second->kv.tables.full.empty(), !wants_place);
    EXPECT_FALSE(first->kv.tables.full.empty());
    scheduler.enqueue(std::move(third));  // without pages, it waits like any other
    EXPECT_EQ(scheduler.num_waiting(), 1);
    for (auto* early : {&first, &second})
      if (!(*early)->kv.tables.full.empty()) scheduler.enqueue(std::move(*early));
    while (const Sequence* s = scheduler.first()) scheduler.remove(s->id);
    EXPECT_EQ(scheduler.num_used_pages(), 0);
  }
}

// No sequence is retracted while a reservation has pages.
TEST(ReservedPages, AreGivenBackBeforeASequenceIsRetracted) {
  SchedulerLimits limits = kLimits;
  limits.conservativeness = 0;
  DpScheduler scheduler(1, limits, {6, 4});
  scheduler.enqueue(sequence("grows", 4, 19));
  run_step(scheduler);
  auto early = awaiting("early", 8, 2);
  ASSERT_TRUE(scheduler.reserve(*early));
  for (int i = 0; i < 18; ++i) {
    EXPECT_EQ(early->kv.tables.full.size(), i <= 12 ? 2u : 0u) << i;
    run_step(scheduler);
  }
  EXPECT_EQ(scheduler.num_retracted(), 0);
  EXPECT_EQ(scheduler.num_reserved(), 0);
  scheduler.remove("grows");
}

TEST(ReservedPages, IncludeTheLastWindowPages) {
  DpScheduler scheduler(1, kLimits, {10, 4, 8, 6});
  scheduler.plan_step();
  auto early = awaiting("early", 18, 5);
  ASSERT_TRUE(scheduler.reserve(*early));
  EXPECT_EQ(early->kv.tables.full.size(), 5u);
  EXPECT_EQ(early->kv.tables.first_window, 2) << "pages before the window are not needed";
  EXPECT_EQ(early->kv.tables.window.size(), 5u);
  EXPECT_EQ(scheduler.num_used_window_pages(), 3);
  scheduler.enqueue(std::move(early));
  scheduler.remove("early");
  EXPECT_EQ(scheduler.num_used_window_pages(), 0);
}

// Pages that are cached count as received.
TEST(ReservedPages, BeginWithCachedOnes) {
  SchedulerLimits limits = kLimits;
  limits.reuses_prefixes = true;
  DpScheduler scheduler(1, limits, {12, 4});
  scheduler.enqueue(sequence("before", 16, 2));
  run_step(scheduler);
  scheduler.remove("before");
  auto part = awaiting("part", 18, 5), whole = awaiting("whole", 16, 5);
  ASSERT_TRUE(scheduler.reserve(*part));
  EXPECT_EQ(part->kv.num_published_pages, 4);
  EXPECT_EQ(part->kv.num_cached, 16);
  ASSERT_TRUE(scheduler.reserve(*whole));
  EXPECT_EQ(whole->kv.num_cached, 16) << "the first token needs no row";
  EXPECT_EQ(scheduler.num_used_pages(), 5);
  for (auto* early : {&part, &whole}) {
    const std::string id = (*early)->id;
    scheduler.enqueue(std::move(*early));
    scheduler.remove(id);
  }
  EXPECT_EQ(scheduler.num_leaked_pages(), 0);
}

}  // namespace
}  // namespace fp4moe
