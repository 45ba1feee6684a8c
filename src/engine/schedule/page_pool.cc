#include "engine/schedule/page_pool.h"

#include <limits>
#include <string>

#include "base/check.h"

namespace fp4moe {
namespace {

int64_t checked_num_pages(int64_t num_pages, int page_size) {
  FP4MOE_CHECK(num_pages >= 0 && num_pages <= std::numeric_limits<int32_t>::max(),
               "num_pages=" + std::to_string(num_pages));
  FP4MOE_CHECK(page_size >= 1, "page_size=" + std::to_string(page_size));
  return num_pages;
}

}  // namespace

PagePool::PagePool(int64_t num_pages, int page_size)
    : page_size_(page_size), tree_(checked_num_pages(num_pages, page_size), page_size) {
  references_.assign(static_cast<size_t>(num_pages), 0);
  free_.reserve(static_cast<size_t>(num_pages));
  for (int64_t page = num_pages - 1; page >= 0; --page) free_.push_back(static_cast<int32_t>(page));
}

PagePool::~PagePool() {
  FP4MOE_CHECK(num_available() == num_pages(), "leaked KV pages: only " + std::to_string(num_available()) +
                                                   " of " + std::to_string(num_pages()) +
                                                   " are free or cached");
}

void PagePool::refer(int32_t page) {
  ++num_references_;
  if (references_[static_cast<size_t>(page)]++ > 0) return;
  ++num_used_;
  if (tree_.contains(page)) tree_.pin(page);
}

void PagePool::release_page(int32_t page) {
  FP4MOE_CHECK(page >= 0 && page < num_pages() && references_[static_cast<size_t>(page)] > 0,
               "KV page " + std::to_string(page) + " of " + std::to_string(num_pages()) + " is not in use");
  --num_references_;
  if (--references_[static_cast<size_t>(page)] > 0) return;
  --num_used_;
  if (tree_.contains(page)) {
    tree_.unpin(page, time_);
  } else {
    free_.push_back(page);
  }
}

bool PagePool::grow(std::vector<int32_t>& page_table, int64_t num_tokens) {
  const auto wanted = static_cast<size_t>(pages_for(num_tokens));
  if (wanted <= page_table.size()) return true;
  if (wanted - page_table.size() > static_cast<size_t>(num_available())) return false;
  page_table.reserve(wanted);  // anything that may throw comes before changes to the pool
  while (page_table.size() < wanted) {
    if (free_.empty()) free_.push_back(tree_.evict());
    const int32_t page = free_.back();
    free_.pop_back();
    refer(page);
    page_table.push_back(page);
  }
  return true;
}

void PagePool::release(std::vector<int32_t>& page_table) {
  ++time_;
  for (const int32_t page : page_table) release_page(page);
  page_table.clear();
}

std::span<const int32_t> PagePool::tokens_of(std::span<const int32_t> token_ids, int64_t page) const {
  return token_ids.subspan(static_cast<size_t>(page * page_size_), static_cast<size_t>(page_size_));
}

PagePool::Prefix PagePool::find_prefix(std::span<const int32_t> token_ids) const {
  Prefix prefix;
  int32_t page = PrefixTree::kRoot;
  for (const int64_t whole = std::ssize(token_ids) / page_size_; prefix.num_pages < whole;
       ++prefix.num_pages) {
    page = tree_.find(page, tokens_of(token_ids, prefix.num_pages));
    if (page == PrefixTree::kNone) break;
    prefix.num_cached += references_[static_cast<size_t>(page)] == 0;
  }
  return prefix;
}

void PagePool::take_prefix(std::span<const int32_t> token_ids, std::vector<int32_t>& page_table) {
  FP4MOE_CHECK(page_table.empty(), "the table already has " + std::to_string(page_table.size()) + " pages");
  int32_t page = PrefixTree::kRoot;
  for (int64_t i = 0; i < std::ssize(token_ids) / page_size_; ++i) {
    page = tree_.find(page, tokens_of(token_ids, i));
    if (page == PrefixTree::kNone) return;
    page_table.push_back(page);
    refer(page);
  }
}

int64_t PagePool::publish_prefix(std::span<const int32_t> token_ids, std::vector<int32_t>& page_table,
                                 int64_t num_published) {
  for (const int64_t whole = std::ssize(token_ids) / page_size_; num_published < whole; ++num_published) {
    int32_t& page = page_table[static_cast<size_t>(num_published)];
    const int32_t parent =
        num_published == 0 ? PrefixTree::kRoot : page_table[static_cast<size_t>(num_published) - 1];
    const std::span<const int32_t> tokens = tokens_of(token_ids, num_published);
    const int32_t same = tree_.find(parent, tokens);
    if (same == PrefixTree::kNone) {
      tree_.insert(page, parent, tokens);
    } else {
      refer(same);
      release_page(page);
      page = same;
    }
  }
  return num_published;
}

void PagePool::forget(std::span<const int32_t> page_table) {
  for (auto page = page_table.rbegin(); page != page_table.rend(); ++page) {
    if (!tree_.contains(*page)) continue;
    if (references_[static_cast<size_t>(*page)] > 1 || !tree_.is_leaf(*page)) return;
    tree_.erase(*page);
  }
}

void PagePool::flush() {
  while (tree_.num_idle() > 0) free_.push_back(tree_.evict());
}

}  // namespace fp4moe
