// StatePool: the state slots of one data-parallel group: free, used by running sequences, or snapshots beside
// nodes of the prefix tree.
#pragma once

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "kernels/batch.h"

namespace fp4moe {

// Slots 1 to num_slots - 1; slot 0 is scrap. A running sequence owns one slot. All others are free or hold
// snapshots: the state after the tokens on the path to a node of the prefix tree, which is a full page. A
// node has at most one snapshot. A snapshot is evicted, least recently used first, when a sequence or another
// snapshot needs its slot; its node stays.
//
// The pool's methods act as if their copies ran at once. The copies that they record must run in order, after
// the rows of the steps so far and before those of the next step.
//
// Single-threaded.
class StatePool {
 public:
  static constexpr int32_t kNone = -1;

  // num_slots 0: a model without states. num_nodes: of the prefix tree.
  StatePool(int64_t num_slots, int64_t num_nodes);

  bool has_states() const { return !holders_.empty(); }
  bool has_snapshot(int32_t node) const {
    return has_states() && snapshots_[static_cast<size_t>(node)].slot != kNone;
  }

  // Returns a slot for a sequence. `node`: the slot gets the node's snapshot; kNone: its content is
  // undefined, because the sequence starts at position 0. Requires num_available() > 0.
  int32_t allocate(int32_t node = kNone);
  void release(int32_t slot);
  // Copies a used slot to a snapshot of the node. Returns false and does nothing if the node has a snapshot
  // or all slots are used.
  bool take_snapshot(int32_t slot, int32_t node);
  // Releases a used slot and makes it the node's snapshot, unless the node has one.
  void leave_snapshot(int32_t slot, int32_t node);
  void drop_snapshot(int32_t node);
  void drop_all_snapshots();

  // Returns the copies recorded since the last call, without those whose result nothing can read.
  std::vector<StateCopy> take_copies();

  // Slot 0 is counted nowhere.
  int64_t num_slots() const { return has_states() ? static_cast<int64_t>(holders_.size()) - 1 : 0; }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  int64_t num_snapshots() const { return static_cast<int64_t>(oldest_.size()); }
  int64_t num_used() const { return num_slots() - num_available(); }
  int64_t num_available() const { return num_free() + num_snapshots(); }

 private:
  static constexpr int32_t kFree = -1, kUsed = -2;
  struct Snapshot {
    int32_t slot = kNone;
    int64_t time = 0;  // of the last use
  };
  int32_t take_slot();
  void attach(int32_t slot, int32_t node);
  void check_used(int32_t slot) const;

  std::vector<int32_t> holders_;                  // [num_slots]: kFree, kUsed or the node of a snapshot
  std::vector<int32_t> free_;                     // used as a stack
  std::vector<Snapshot> snapshots_;               // [num_nodes]
  std::set<std::pair<int64_t, int32_t>> oldest_;  // (time, node) of every snapshot
  std::vector<StateCopy> copies_;
  int64_t time_ = 0;  // counts uses
};

}  // namespace fp4moe
