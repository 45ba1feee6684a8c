#include "engine/schedule/page_pool.h"

#include <string>

#include "base/check.h"

namespace fp4moe {
namespace {

KvWindow checked_window(const PoolShape& shape) {
  FP4MOE_CHECK(shape.page_size >= 1, "page_size=" + std::to_string(shape.page_size));
  FP4MOE_CHECK((shape.window > 0) == (shape.num_window_pages > 0),
               "window=" + std::to_string(shape.window) +
                   " num_window_pages=" + std::to_string(shape.num_window_pages));
  return {shape.window, shape.page_size};
}

}  // namespace

PagePool::PagePool(const PoolShape& shape)
    : window_(checked_window(shape)),
      references_(shape.num_pages),
      tree_(shape.num_pages, shape.page_size),
      window_pages_(shape.num_window_pages, shape.num_pages),
      states_(shape.num_slots, shape.num_pages) {}

PagePool::~PagePool() {
  FP4MOE_CHECK(num_available() == num_pages(), "leaked KV pages: only " + std::to_string(num_available()) +
                                                   " of " + std::to_string(num_pages()) +
                                                   " are free or cached");
  FP4MOE_CHECK(window_pages_.num_available() == num_window_pages(),
               "leaked window pages: only " + std::to_string(window_pages_.num_available()) + " of " +
                   std::to_string(num_window_pages()) + " are free or cached");
  FP4MOE_CHECK(states_.num_used() == 0, "leaked state slots: " + std::to_string(states_.num_used()) + " of " +
                                            std::to_string(states_.num_slots()) + " are still used");
}

// ---- the tables of one sequence -------------------------------------------------------------------

void PagePool::refer(int32_t page) {
  if (references_.refer(page) && tree_.contains(page)) tree_.pin(page);
}

void PagePool::release_page(int32_t page) {
  if (!references_.release(page)) return;
  if (tree_.contains(page)) {
    tree_.unpin(page, time_);
  } else {
    references_.put_free(page);
  }
}

int32_t PagePool::evict() {
  const int32_t page = tree_.evict();
  if (has_window()) window_pages_.detach(page);
  states_.drop_snapshot(page);
  return page;
}

bool PagePool::grow(PageTables& tables, int64_t num_tokens) {
  std::vector<int32_t>& table = tables.full;
  const auto wanted = static_cast<size_t>(pages_for(num_tokens));
  if (wanted <= table.size()) return true;
  if (wanted - table.size() > static_cast<size_t>(num_available())) return false;
  table.reserve(wanted);  // anything that may throw comes before changes to the pool
  while (table.size() < wanted) {
    if (num_free() == 0) references_.put_free(evict());
    const int32_t page = references_.take_free();
    refer(page);
    table.push_back(page);
  }
  return true;
}

bool PagePool::grow_window(PageTables& tables, int64_t num_tokens) {
  if (!has_window()) return true;
  std::vector<int32_t>& table = tables.window;
  const auto wanted = static_cast<size_t>(pages_for(num_tokens));
  if (wanted <= table.size()) return true;
  if (wanted - table.size() > static_cast<size_t>(window_pages_.num_available())) return false;
  table.reserve(wanted);
  while (table.size() < wanted) table.push_back(window_pages_.allocate());
  return true;
}

void PagePool::leave_window(PageTables& tables, int64_t position) {
  const int64_t first = window_.first_page(position);
  if (first <= tables.first_window) return;
  ++time_;
  if (first > std::ssize(tables.window)) tables.window.resize(static_cast<size_t>(first), WindowPool::kNone);
  for (; tables.first_window < first; ++tables.first_window) {
    int32_t& page = tables.window[static_cast<size_t>(tables.first_window)];
    if (page != WindowPool::kNone) window_pages_.release(page, time_, /*left_window=*/true);
    page = 0;
  }
}

void PagePool::release(PageTables& tables) {
  ++time_;
  for (const int32_t page : tables.full) release_page(page);
  for (int64_t i = tables.first_window; i < std::ssize(tables.window); ++i)
    window_pages_.release(tables.window[static_cast<size_t>(i)], time_, /*left_window=*/false);
  tables = {};
}

// ---- prefixes -------------------------------------------------------------------------------------

std::span<const int32_t> PagePool::tokens_of(std::span<const int32_t> token_ids, int64_t page) const {
  const auto size = static_cast<size_t>(page_size());
  return token_ids.subspan(static_cast<size_t>(page) * size, size);
}

// Returns the pages of the prefix that find_prefix() describes, and its num_matched.
std::vector<int32_t> PagePool::match(std::span<const int32_t> token_ids, bool needs_snapshot,
                                     int64_t* num_matched) const {
  needs_snapshot = needs_snapshot && states_.has_states();
  std::vector<int32_t> path;
  size_t usable = 0;
  int64_t first_present = 0;  // all pages of the path from here on have window pages
  int32_t page = PrefixTree::kRoot;
  for (int64_t i = 0; i < std::ssize(token_ids) / page_size(); ++i) {
    page = tree_.find(page, tokens_of(token_ids, i));
    if (page == PrefixTree::kNone) break;
    path.push_back(page);
    if (has_window() && window_pages_.page_of(page) == WindowPool::kNone) first_present = i + 1;
    if (first_present > window_.first_page((i + 1) * page_size())) continue;
    if (!needs_snapshot || states_.has_snapshot(page)) usable = path.size();
  }
  if (num_matched != nullptr) *num_matched = std::ssize(path);
  path.resize(usable);
  return path;
}

PagePool::Prefix PagePool::find_prefix(std::span<const int32_t> token_ids, bool needs_snapshot) const {
  Prefix prefix;
  const std::vector<int32_t> path = match(token_ids, needs_snapshot, &prefix.num_matched);
  prefix.num_pages = std::ssize(path);
  for (const int32_t page : path) prefix.num_cached += references_.count(page) == 0;
  return prefix;
}

void PagePool::take_prefix(std::span<const int32_t> token_ids, PageTables& tables, bool needs_snapshot) {
  FP4MOE_CHECK(tables.full.empty() && tables.window.empty(),
               "the tables already have " + std::to_string(tables.full.size()) + " pages");
  tables.full = match(token_ids, needs_snapshot);
  for (const int32_t page : tables.full) refer(page);
  if (!has_window()) return;
  tables.first_window = window_.first_page(std::ssize(tables.full) * page_size());
  tables.window.assign(tables.full.size(), 0);
  for (size_t i = static_cast<size_t>(tables.first_window); i < tables.window.size(); ++i) {
    tables.window[i] = window_pages_.page_of(tables.full[i]);
    window_pages_.share(tables.window[i]);
  }
}

int64_t PagePool::publish_prefix(std::span<const int32_t> token_ids, PageTables& tables,
                                 int64_t num_published) {
  for (const int64_t whole = std::ssize(token_ids) / page_size(); num_published < whole; ++num_published) {
    int32_t& page = tables.full[static_cast<size_t>(num_published)];
    const int32_t parent =
        num_published == 0 ? PrefixTree::kRoot : tables.full[static_cast<size_t>(num_published) - 1];
    const std::span<const int32_t> tokens = tokens_of(token_ids, num_published);
    const int32_t same = tree_.find(parent, tokens);
    if (same == PrefixTree::kNone) {
      tree_.insert(page, parent, tokens);
    } else {
      refer(same);
      release_page(page);
      page = same;
    }
    if (has_window() && num_published >= tables.first_window) publish_window(tables, num_published);
  }
  return num_published;
}

// Publishes the window page of a full page that has just been published: it becomes the node's, or the table
// gets the page that the node already has.
void PagePool::publish_window(PageTables& tables, int64_t index) {
  const int32_t node = tables.full[static_cast<size_t>(index)];
  int32_t& page = tables.window[static_cast<size_t>(index)];
  const int32_t known = window_pages_.page_of(node);
  if (known == WindowPool::kNone) return window_pages_.attach(page, node);
  window_pages_.share(known);
  window_pages_.release(page, time_, /*left_window=*/false);
  page = known;
}

void PagePool::forget(const PageTables& tables) {
  for (auto page = tables.full.rbegin(); page != tables.full.rend(); ++page) {
    if (!tree_.contains(*page)) continue;
    if (references_.count(*page) > 1 || !tree_.is_leaf(*page)) return;
    tree_.erase(*page);
    if (has_window()) window_pages_.detach(*page);
    states_.drop_snapshot(*page);
  }
}

void PagePool::flush() {
  while (tree_.num_idle() > 0) references_.put_free(evict());
  window_pages_.flush();
  states_.drop_all_snapshots();
}

}  // namespace fp4moe
