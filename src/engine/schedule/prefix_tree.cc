#include "engine/schedule/prefix_tree.h"

#include <algorithm>
#include <string>

#include "base/check.h"
#include "base/hash.h"

namespace fp4moe {

PrefixTree::PrefixTree(int64_t num_pages, int page_size)
    : page_size_(static_cast<size_t>(page_size)), nodes_(static_cast<size_t>(num_pages)) {}

uint64_t PrefixTree::key_of(int32_t parent, std::span<const int32_t> tokens) const {
  return hash64(tokens.data(), static_cast<int64_t>(tokens.size_bytes()), static_cast<uint64_t>(parent));
}

std::span<const int32_t> PrefixTree::tokens_of(int32_t page) const {
  return std::span(tokens_).subspan(static_cast<size_t>(page) * page_size_, page_size_);
}

int32_t PrefixTree::find(int32_t parent, std::span<const int32_t> tokens) const {
  const auto [first, last] = by_key_.equal_range(key_of(parent, tokens));
  for (auto it = first; it != last; ++it)
    if (nodes_[static_cast<size_t>(it->second)].parent == parent &&
        std::ranges::equal(tokens_of(it->second), tokens))
      return it->second;
  return kNone;
}

void PrefixTree::insert(int32_t page, int32_t parent, std::span<const int32_t> tokens) {
  FP4MOE_CHECK(!contains(page), "page " + std::to_string(page) + " is already in the tree");
  if (tokens_.empty()) tokens_.resize(nodes_.size() * page_size_);
  const uint64_t key = key_of(parent, tokens);
  by_key_.emplace(key, page);
  std::ranges::copy(tokens, tokens_.begin() + static_cast<std::ptrdiff_t>(page) * std::ssize(tokens));
  nodes_[static_cast<size_t>(page)] = {.parent = parent, .is_pinned = true, .key = key};
  if (parent == kRoot) return;
  Node& above = nodes_[static_cast<size_t>(parent)];
  FP4MOE_CHECK(contains(parent) && above.is_pinned,
               "page " + std::to_string(parent) + " is not a pinned node");
  ++above.num_children;
}

void PrefixTree::erase(int32_t page) {
  Node& node = nodes_[static_cast<size_t>(page)];
  FP4MOE_CHECK(contains(page) && is_leaf(page), "page " + std::to_string(page) + " is not a leaf");
  const auto [first, last] = by_key_.equal_range(node.key);
  by_key_.erase(std::find_if(first, last, [page](const auto& entry) { return entry.second == page; }));
  if (!node.is_pinned) {
    evictable_.erase({node.time, page});
    --num_idle_;
  }
  const int32_t parent = node.parent;
  node = {};
  if (parent == kRoot) return;
  Node& above = nodes_[static_cast<size_t>(parent)];
  --above.num_children;
  if (is_evictable(above)) evictable_.emplace(above.time, parent);
}

void PrefixTree::pin(int32_t page) {
  Node& node = nodes_[static_cast<size_t>(page)];
  if (is_evictable(node)) evictable_.erase({node.time, page});
  node.is_pinned = true;
  --num_idle_;
}

void PrefixTree::unpin(int32_t page, int64_t time) {
  Node& node = nodes_[static_cast<size_t>(page)];
  node.is_pinned = false;
  node.time = time;
  ++num_idle_;
  if (is_evictable(node)) evictable_.emplace(time, page);
}

int32_t PrefixTree::evict() {
  FP4MOE_CHECK(!evictable_.empty(), std::to_string(num_idle_) + " idle nodes, none of which is a leaf");
  const int32_t page = evictable_.begin()->second;
  erase(page);
  return page;
}

}  // namespace fp4moe
