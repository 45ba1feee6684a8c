#include "engine/schedule/state_pool.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace fp4moe {
namespace {

// Runs the recorded copies, then expects that every used slot has its state (-1: any) and writes another one.
void run_step(StatePool& pool, std::vector<int>& memory, std::map<int32_t, int>& used, int& next_state) {
  for (const StateCopy& copy : pool.take_copies())
    memory[static_cast<size_t>(copy.to)] = memory[static_cast<size_t>(copy.from)];
  for (auto& [slot, state] : used) {
    ASSERT_GT(slot, 0);
    if (state >= 0) {
      ASSERT_EQ(memory[static_cast<size_t>(slot)], state) << "slot " << slot;
    }
    memory[static_cast<size_t>(slot)] = state = next_state++;
  }
}

// Random operations against a model of the contents: a slot's or a snapshot's content is the number of the
// state that was written to it. The copies run in batches, as a step runs them, between which used slots are
// written.
TEST(StatePool, EverySlotHasTheStateOfItsOwner) {
  int num_evicted = 0, num_read = 0;
  for (unsigned seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    const int num_slots = 2 + below(9), num_nodes = 6;
    StatePool pool(num_slots, num_nodes);
    std::vector<int> memory(static_cast<size_t>(num_slots), -1);
    std::map<int32_t, int> used, snapshots;  // slot or node -> the state that it must have; -1: any
    int next_state = 0;
    const auto forget_evicted = [&] {
      num_evicted += static_cast<int>(
          std::erase_if(snapshots, [&](const auto& entry) { return !pool.has_snapshot(entry.first); }));
    };
    for (int i = 0; i < 2000; ++i) {
      const int32_t node = below(num_nodes);
      switch (below(6)) {
        case 0:
          if (pool.num_available() == 0) break;
          used[pool.allocate()] = -1;
          break;
        case 1:
          if (!pool.has_snapshot(node)) break;
          used[pool.allocate(node)] = snapshots.at(node);
          ++num_read;
          break;
        case 2:
          if (used.empty()) break;
          if (below(2) == 0) {
            pool.release(used.begin()->first);
          } else {
            const bool had_one = pool.has_snapshot(node);
            pool.leave_snapshot(used.begin()->first, node);
            if (!had_one) snapshots[node] = used.begin()->second;
          }
          used.erase(used.begin());
          break;
        case 3:
          if (used.empty()) break;
          if (pool.take_snapshot(used.rbegin()->first, node)) {
            forget_evicted();
            snapshots[node] = used.rbegin()->second;
          }
          break;
        case 4:
          pool.drop_snapshot(node);
          break;
        default:
          run_step(pool, memory, used, next_state);
      }
      forget_evicted();
      ASSERT_EQ(pool.num_used(), std::ssize(used));
      ASSERT_EQ(pool.num_snapshots(), std::ssize(snapshots));
      ASSERT_EQ(pool.num_free(), num_slots - 1 - std::ssize(used) - std::ssize(snapshots));
    }
  }
  EXPECT_GT(num_read, 1000);
  EXPECT_GT(num_evicted, 1000);
}

TEST(StatePool, TheLeastRecentlyUsedSnapshotIsEvicted) {
  StatePool pool(4, 8);
  for (const int32_t node : {1, 2, 3}) pool.leave_snapshot(pool.allocate(), node);
  pool.release(pool.allocate(1));  // evicts 2, the oldest after 1
  EXPECT_TRUE(pool.has_snapshot(1));
  EXPECT_FALSE(pool.has_snapshot(2));
  EXPECT_TRUE(pool.has_snapshot(3));
  pool.drop_all_snapshots();
  EXPECT_EQ(pool.num_free(), 3);
}

TEST(StatePool, AModelWithoutStatesHasNone) {
  StatePool pool(0, 8);
  EXPECT_FALSE(pool.has_states());
  EXPECT_FALSE(pool.has_snapshot(3));
  pool.drop_snapshot(3);
  EXPECT_EQ(pool.num_slots(), 0);
  EXPECT_EQ(pool.num_available(), 0);
  EXPECT_TRUE(pool.take_copies().empty());
}

using StatePoolDeathTest = testing::Test;
TEST(StatePoolDeathTest, MistakesAreFatal) {
  StatePool pool(3, 8);
  EXPECT_DEATH(pool.release(0), "state slot 0");
  EXPECT_DEATH(pool.release(1), "not used");
  pool.allocate();
  pool.allocate();
  EXPECT_DEATH(pool.allocate(), "all 2 state slots are used");
  EXPECT_DEATH(pool.allocate(3), "has no snapshot");
}

}  // namespace
}  // namespace fp4moe
