// WindowPool: the pages of window layers: free, used by sequences, or cached beside a node of the prefix
// tree.
#pragma once

#include <cstdint>
#include <set>
#include <tuple>
#include <vector>

#include "engine/schedule/page_references.h"

namespace fp4moe {

// A node of the prefix tree, which is a full page, has at most one window page: that of the same tokens. The
// window page can be evicted without the node, but not the node without its window page.
//
// Cached pages are evicted in this order: pages that left the window of the sequence that computed them, and
// that no other sequence has taken; then all others; both least recently released first. So a long prompt
// does not evict the pages at the ends of earlier requests, from which the next turn of a conversation
// continues.
//
// Single-threaded.
class WindowPool {
 public:
  static constexpr int32_t kNone = -1;

  WindowPool(int64_t num_pages, int64_t num_nodes);

  // Returns a used page, which may have been a cached page. Requires num_available() > 0.
  int32_t allocate();
  // Another sequence takes the page of a node.
  void share(int32_t page);
  // left_window: the sequence goes on without the page. `time` orders the releases.
  void release(int32_t page, int64_t time, bool left_window);

  void attach(int32_t page, int32_t node);
  // Frees the node's page, unless a sequence uses it.
  void detach(int32_t node);
  int32_t page_of(int32_t node) const { return page_of_[static_cast<size_t>(node)]; }
  void flush();  // frees all cached pages

  bool is_used(int32_t page) const { return references_.count(page) > 0; }
  const PageReferences& references() const { return references_; }
  int64_t num_cached() const { return static_cast<int64_t>(evictable_.size()); }
  int64_t num_available() const { return references_.num_free() + num_cached(); }

 private:
  struct State {
    int32_t node = kNone;
    bool was_shared = false;
    bool is_passed = false;  // it left the window of its only sequence
    int64_t time = 0;        // of the release
  };
  std::tuple<bool, int64_t, int32_t> place_of(int32_t page) const;
  void evict_oldest();

  PageReferences references_;
  std::vector<State> states_;                               // [num_pages]
  std::vector<int32_t> page_of_;                            // [num_nodes]: the node's page, or kNone
  std::set<std::tuple<bool, int64_t, int32_t>> evictable_;  // place_of() every cached page
};

}  // namespace fp4moe
