// PrefixTree: records which KV pages hold which tokens, and after which other pages.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fp4moe {

// A node is a page and is identified by its page number; it holds the page_size tokens that follow its
// parent's path. No two children of a node hold the same tokens. The nodes that sequences use are pinned. The
// caller pins all nodes of a sequence's path, so an idle node has no pinned descendants.
//
// Single-threaded.
class PrefixTree {
 public:
  static constexpr int32_t kRoot = -1, kNone = -2;

  PrefixTree(int64_t num_pages, int page_size);

  bool contains(int32_t page) const { return nodes_[static_cast<size_t>(page)].parent != kNone; }
  // Returns the child of `parent` with these page_size tokens, or kNone.
  int32_t find(int32_t parent, std::span<const int32_t> tokens) const;
  // Inserts a pinned node. Requires find(parent, tokens) == kNone.
  void insert(int32_t page, int32_t parent, std::span<const int32_t> tokens);
  // Erases a node, which must not have children.
  void erase(int32_t page);
  bool is_leaf(int32_t page) const { return nodes_[static_cast<size_t>(page)].num_children == 0; }

  void pin(int32_t page);
  // Makes a node idle. Idle nodes with a smaller `time` are evicted first.
  void unpin(int32_t page, int64_t time);
  int64_t num_idle() const { return num_idle_; }  // nodes that are not pinned
  // Erases and returns the childless idle node that was unpinned earliest. Requires an idle node.
  int32_t evict();

 private:
  struct Node {
    int32_t parent = kNone;  // kNone: this page is not in the tree
    int32_t num_children = 0;
    bool is_pinned = false;
    int64_t time = 0;  // when it was unpinned
    uint64_t key = 0;
  };
  uint64_t key_of(int32_t parent, std::span<const int32_t> tokens) const;
  std::span<const int32_t> tokens_of(int32_t page) const;
  bool is_evictable(const Node& node) const { return !node.is_pinned && node.num_children == 0; }

  size_t page_size_;
  std::vector<Node> nodes_;                            // [num_pages]
  std::vector<int32_t> tokens_;                        // [num_pages, page_size]; empty before the first node
  std::unordered_multimap<uint64_t, int32_t> by_key_;  // contains every node
  std::set<std::pair<int64_t, int32_t>> evictable_;    // (time, page) of idle leaves
  int64_t num_idle_ = 0;
};

}  // namespace fp4moe
