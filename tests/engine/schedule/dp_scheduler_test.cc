#include "engine/schedule/dp_scheduler.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <tuple>

#include "engine/test_sequence.h"

namespace fp4moe {
namespace {

// (group, id, rows) of one step. run_step() also appends a token to sequences whose rows reach their end, and
// removes ended sequences.
using Rows = std::vector<std::tuple<int, std::string, int64_t>>;
Rows run_step(DpScheduler& scheduler) {
  Rows rows;
  std::vector<Sequence*> at_end;
  scheduler.plan_step();
  for (int group = 0; group < scheduler.num_groups(); ++group) {
    std::set<int32_t> pages;
    for (const ScheduledRows& scheduled : scheduler.step(group)) {
      rows.emplace_back(group, scheduled.sequence->id, scheduled.num_rows);
      const Sequence& sequence = *scheduled.sequence;
      for (auto i = static_cast<size_t>(sequence.kv.num_published_pages); i < sequence.kv.tables.full.size();
           ++i)
        EXPECT_TRUE(pages.insert(sequence.kv.tables.full[i]).second)
            << "page " << sequence.kv.tables.full[i] << " twice in group " << group;
      if (scheduled.reaches_end()) at_end.push_back(scheduled.sequence);
    }
  }
  scheduler.commit_step();
  for (Sequence* s : at_end) {
    s->token_ids.push_back(1);
    if (s->num_tokens() == s->max_tokens) scheduler.remove(s->id);
  }
  return rows;
}

constexpr SchedulerLimits kLimits{
    .max_running_requests = 2, .chunked_prefill_size = 4, .max_prefill_tokens = 8};

TEST(DpScheduler, GroupsShareTheLimitsRoundedUp) {
  const SchedulerLimits limits =
      group_limits({.max_running_requests = 64, .chunked_prefill_size = 513, .max_prefill_tokens = 2048}, 4);
  EXPECT_EQ(limits.max_running_requests, 16);
  EXPECT_EQ(limits.chunked_prefill_size, 129);
  EXPECT_EQ(limits.max_prefill_tokens, 512);
  EXPECT_EQ(group_limits({1, 1, 1}, 8).max_running_requests, 1);
  EXPECT_EQ(group_limits({64, 513, 2048}, 1).chunked_prefill_size, 513);
}

TEST(DpScheduler, ARequestGoesToTheGroupWithTheFewestRequestsThenTokensThenTheLowest) {
  DpScheduler scheduler(3, kLimits, {100, 4});
  scheduler.enqueue(sequence("a", 4, 9));
  scheduler.enqueue(sequence("b", 1, 9));
  scheduler.enqueue(sequence("c", 4, 9));
  EXPECT_EQ(run_step(scheduler), (Rows{{0, "a", 4}, {1, "b", 1}, {2, "c", 4}}));
  scheduler.enqueue(sequence("d", 2, 9));  // a and c have two pages now, b has one
  EXPECT_EQ(run_step(scheduler), (Rows{{0, "a", 1}, {1, "b", 1}, {1, "d", 2}, {2, "c", 1}}));
  scheduler.remove("c");
  scheduler.enqueue(sequence("e", 2, 9));
  scheduler.enqueue(sequence("f", 2, 9));
  EXPECT_EQ(run_step(scheduler),  // e alone has one page, a two
            (Rows{{0, "a", 1}, {1, "b", 1}, {1, "d", 1}, {2, "e", 2}, {2, "f", 2}}));
  while (Sequence* s = scheduler.first()) scheduler.remove(s->id);
}

TEST(DpScheduler, WhatNoGroupHasRoomForIsNotOvertaken) {
  DpScheduler scheduler(2, kLimits, {4, 4});
  scheduler.enqueue(sequence("a", 4, 3));
  scheduler.enqueue(sequence("b", 4, 5));
  scheduler.enqueue(sequence("big", 12, 2));
  scheduler.enqueue(sequence("small", 1, 2));
  std::vector<std::string> order;
  for (int step = 0; step < 50 && scheduler.first(); ++step)
    for (const auto& [group, id, num_rows] : run_step(scheduler))
      if (id == "big" || id == "small") order.push_back(id);
  EXPECT_EQ(scheduler.first(), nullptr);
  ASSERT_GE(order.size(), 2u);
  EXPECT_EQ(order.front(), "big");
}

TEST(DpScheduler, ARetractedRequestStaysInItsGroup) {
  DpScheduler scheduler(2,
                        {.max_running_requests = 4,
                         .chunked_prefill_size = 64,
                         .max_prefill_tokens = 64,
                         .conservativeness = 0},
                        {4, 2});
  for (const char* id : {"a", "b", "c", "d"}) scheduler.enqueue(sequence(id, 2, 6));
  std::map<std::string, std::set<int>> groups;
  int num_steps = 0;
  for (; scheduler.first() && num_steps < 100; ++num_steps)
    for (const auto& [group, id, num_rows] : run_step(scheduler)) groups[id].insert(group);
  EXPECT_LT(num_steps, 100);
  EXPECT_GE(scheduler.num_retracted(), 2);
  for (const auto& [id, seen] : groups) EXPECT_EQ(seen.size(), 1u) << id;
  EXPECT_EQ(scheduler.num_free_pages(), scheduler.num_pages());
}

TEST(DpScheduler, AGroupThatHasTheBeginningMayRunOneRequestMore) {
  SchedulerLimits limits = kLimits;
  limits.max_running_requests = 8;
  limits.reuses_prefixes = true;
  DpScheduler scheduler(2, limits, {100, 4});
  const auto add = [&](const std::string& id, int32_t token) {
    auto made = sequence(id, 9, 40);
    made->token_ids.assign(9, token);
    scheduler.enqueue(std::move(made));
    for (int step = 0; step < 4; ++step) run_step(scheduler);
  };
  const auto group_of = [&](const std::string& id) {
    for (const auto& [group, running, num_rows] : run_step(scheduler))
      if (running == id) return group;
    return -1;
  };
  add("a", 5);
  EXPECT_EQ(group_of("a"), 0);
  add("like a", 5);
  EXPECT_EQ(group_of("like a"), 0);
  EXPECT_EQ(scheduler.find("like a")->kv.num_reused, 8);
  add("like a too", 5);  // its group has two requests more than the other group
  EXPECT_EQ(group_of("like a too"), 1);
  add("other", 6);
  EXPECT_EQ(group_of("other"), 1);
  while (Sequence* s = scheduler.first()) scheduler.remove(s->id);
  EXPECT_EQ(scheduler.num_free_pages() + scheduler.num_cached_pages(), scheduler.num_pages());
  scheduler.flush();
  EXPECT_EQ(scheduler.num_free_pages(), scheduler.num_pages());
}

// Random requests are cancelled at random while queued, in prefill and in decode. Every step respects each
// group's limits, all other requests end, and all pages are returned.
TEST(DpScheduler, AllEndWhateverIsCancelled) {
  std::mt19937 random(7);
  for (const int num_groups : {1, 2, 4})
    for (const int64_t num_pages : {6, 9, 40}) {
      DpScheduler scheduler(num_groups, kLimits, {num_pages, 3});
      std::set<std::string> alive;
      for (int i = 0; i < 30; ++i) {
        const std::string id = std::to_string(i);
        scheduler.enqueue(
            sequence(id, 1 + static_cast<int64_t>(random() % 10), 1 + static_cast<int64_t>(random() % 8)));
        alive.insert(id);
      }
      int num_steps = 0;
      for (; scheduler.first() && num_steps < 1000; ++num_steps) {
        std::vector<int64_t> rows(static_cast<size_t>(num_groups), 0), requests = rows;
        for (const auto& [group, id, num_rows] : run_step(scheduler)) {
          rows[static_cast<size_t>(group)] += num_rows;
          ++requests[static_cast<size_t>(group)];
        }
        for (size_t group = 0; group < rows.size(); ++group) {
          EXPECT_LE(requests[group], kLimits.max_running_requests);
          EXPECT_LE(rows[group], kLimits.max_prefill_tokens + kLimits.max_running_requests);
        }
        if (random() % 3 == 0) scheduler.remove(std::to_string(random() % 30));
      }
      EXPECT_LT(num_steps, 1000);
      EXPECT_EQ(scheduler.num_free_pages(), scheduler.num_pages());
      EXPECT_EQ(scheduler.num_waiting(), 0);
    }
}

}  // namespace
}  // namespace fp4moe
