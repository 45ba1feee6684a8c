#include "engine/schedule/state_pool.h"

#include <algorithm>
#include <string>

#include "base/check.h"

namespace fp4moe {

StatePool::StatePool(int64_t num_slots, int64_t num_nodes)
    : holders_(static_cast<size_t>(num_slots), kFree),
      snapshots_(static_cast<size_t>(num_slots > 0 ? num_nodes : 0)) {
  for (int64_t slot = num_slots - 1; slot > 0; --slot) free_.push_back(static_cast<int32_t>(slot));
}

void StatePool::check_used(int32_t slot) const {
  FP4MOE_CHECK(slot > 0 && slot <= num_slots() && holders_[static_cast<size_t>(slot)] == kUsed,
               "state slot " + std::to_string(slot) + " of " + std::to_string(num_slots()) + " is not used");
}

int32_t StatePool::take_slot() {
  FP4MOE_CHECK(num_available() > 0, "all " + std::to_string(num_slots()) + " state slots are used");
  if (free_.empty()) drop_snapshot(oldest_.begin()->second);
  const int32_t slot = free_.back();
  free_.pop_back();
  holders_[static_cast<size_t>(slot)] = kUsed;
  return slot;
}

// If the node's snapshot is the only one and no slot is free, the sequence gets the snapshot's slot itself.
int32_t StatePool::allocate(int32_t node) {
  if (node == kNone) return take_slot();
  FP4MOE_CHECK(has_snapshot(node), "node " + std::to_string(node) + " has no snapshot");
  Snapshot& snapshot = snapshots_[static_cast<size_t>(node)];
  oldest_.erase({snapshot.time, node});
  snapshot.time = ++time_;
  oldest_.emplace(snapshot.time, node);
  const int32_t from = snapshot.slot, slot = take_slot();
  if (slot != from) copies_.push_back({from, slot});
  return slot;
}

void StatePool::release(int32_t slot) {
  check_used(slot);
  holders_[static_cast<size_t>(slot)] = kFree;
  free_.push_back(slot);
}

bool StatePool::take_snapshot(int32_t slot, int32_t node) {
  check_used(slot);
  if (has_snapshot(node) || num_available() == 0) return false;
  const int32_t to = take_slot();
  copies_.push_back({slot, to});
  attach(to, node);
  return true;
}

void StatePool::leave_snapshot(int32_t slot, int32_t node) {
  check_used(slot);
  if (has_snapshot(node)) return release(slot);
  attach(slot, node);
}

void StatePool::attach(int32_t slot, int32_t node) {
  holders_[static_cast<size_t>(slot)] = node;
  snapshots_[static_cast<size_t>(node)] = {slot, ++time_};
  oldest_.emplace(time_, node);
}

void StatePool::drop_snapshot(int32_t node) {
  if (!has_snapshot(node)) return;
  Snapshot& snapshot = snapshots_[static_cast<size_t>(node)];
  oldest_.erase({snapshot.time, node});
  holders_[static_cast<size_t>(snapshot.slot)] = kFree;
  free_.push_back(snapshot.slot);
  snapshot = {};
}

// Goes backwards, so that it knows which slots are still read.
std::vector<StateCopy> StatePool::take_copies() {
  std::vector<bool> is_read(holders_.size());
  for (size_t slot = 1; slot < holders_.size(); ++slot) is_read[slot] = holders_[slot] != kFree;
  std::vector<StateCopy> copies;
  for (auto copy = copies_.rbegin(); copy != copies_.rend(); ++copy) {
    if (!is_read[static_cast<size_t>(copy->to)]) continue;
    is_read[static_cast<size_t>(copy->to)] = false;
    is_read[static_cast<size_t>(copy->from)] = true;
    copies.push_back(*copy);
  }
  copies_.clear();
  std::ranges::reverse(copies);
  return copies;
}

void StatePool::drop_all_snapshots() {
  while (!oldest_.empty()) drop_snapshot(oldest_.begin()->second);
}

}  // namespace fp4moe
