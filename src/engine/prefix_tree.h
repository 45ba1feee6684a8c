// PrefixTree: which KV pages hold which tokens, behind which other pages.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fp4moe {

// A node is a page and has its number: page_size tokens behind those of its parent's path. No two children of
// a node hold the same tokens. Nodes that a sequence uses are held; who holds a node holds its whole path, so
// below a node that is not held no node is.
//
// Single-threaded.
class PrefixTree {
 public:
  static constexpr int32_t kRoot = -1, kNone = -2;

  PrefixTree(int64_t num_pages, int page_size);

  bool contains(int32_t page) const { return nodes_[static_cast<size_t>(page)].parent != kNone; }
  // The child of `parent` with these page_size tokens, or kNone.
  int32_t find(int32_t parent, std::span<const int32_t> tokens) const;
  // A held node; find(parent, tokens) is kNone.
  void insert(int32_t page, int32_t parent, std::span<const int32_t> tokens);
  // A node without children.
  void erase(int32_t page);
  bool is_leaf(int32_t page) const { return nodes_[static_cast<size_t>(page)].num_children == 0; }

  void hold(int32_t page);
  // Of several nodes that are let go, those of an earlier `time` are the first to be evicted.
  void let_go(int32_t page, int64_t time);
  int64_t num_idle() const { return num_idle_; }  // nodes that nobody holds
  // Erases the node without children that was let go first, and returns it. There is an idle node.
  int32_t evict();

 private:
  struct Node {
    int32_t parent = kNone;  // kNone: this page is not in the tree
    int32_t num_children = 0;
    bool is_held = false;
    int64_t time = 0;  // when it was let go
    uint64_t key = 0;
  };
  uint64_t key_of(int32_t parent, std::span<const int32_t> tokens) const;
  std::span<const int32_t> tokens_of(int32_t page) const;
  bool is_evictable(const Node& node) const { return !node.is_held && node.num_children == 0; }

  size_t page_size_;
  std::vector<Node> nodes_;                            // [num_pages]
  std::vector<int32_t> tokens_;                        // [num_pages, page_size]; empty before the first node
  std::unordered_multimap<uint64_t, int32_t> by_key_;  // all nodes
  std::set<std::pair<int64_t, int32_t>> evictable_;    // (time, page) of idle leaves
  int64_t num_idle_ = 0;
};

}  // namespace fp4moe
