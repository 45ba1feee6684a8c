// PagePool: tracks which KV pages are free, used by sequences' page tables, or cached as prefixes of past
// requests.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/schedule/prefix_tree.h"

namespace fp4moe {

// Single-threaded. Every page is in exactly one state: free, used (in one or more tables) or cached (in no
// table, but published with its tokens). Only published pages can be in more than one table. A double free, a
// foreign page or a leak (a page that is still used at destruction) fails a CHECK.
class PagePool {
 public:
  PagePool(int64_t num_pages, int page_size);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // Grows `page_table` until it covers num_tokens, from free pages first, then by evicting the least recently
  // released cached pages. Returns false and changes nothing if free and cached pages together are too few.
  bool grow(std::vector<int32_t>& page_table, int64_t num_tokens);
  // Empties `page_table`. Those of its pages that are in no other table become cached if they are published,
  // otherwise free.
  void release(std::vector<int32_t>& page_table);

  // The published pages that hold a prefix of `token_ids`.
  struct Prefix {
    int64_t num_pages = 0;
    int64_t num_cached = 0;  // cached pages among them; the rest are used
  };
  Prefix find_prefix(std::span<const int32_t> token_ids) const;
  // Appends these pages to `page_table`, which must be empty.
  void take_prefix(std::span<const int32_t> token_ids, std::vector<int32_t>& page_table);
  // Publishes the pages of `page_table` that `token_ids` fills completely; the first num_published pages are
  // already published. If another page already holds the same tokens, the table gets that page instead.
  // Returns the new number of published pages.
  int64_t publish_prefix(std::span<const int32_t> token_ids, std::vector<int32_t>& page_table,
                         int64_t num_published);
  // Unpublishes the trailing pages of this table that are in no other table and are not followed by a
  // published page.
  void forget(std::span<const int32_t> page_table);
  // Frees all cached pages.
  void flush();

  int64_t pages_for(int64_t num_tokens) const { return (num_tokens + page_size_ - 1) / page_size_; }
  int64_t num_pages() const { return static_cast<int64_t>(references_.size()); }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  int64_t num_cached() const { return tree_.num_idle(); }
  int64_t num_used() const { return num_used_; }
  int64_t num_available() const { return num_free() + num_cached(); }
  int64_t num_references() const { return num_references_; }  // entries of all tables
  int page_size() const { return page_size_; }

 private:
  void refer(int32_t page);
  void release_page(int32_t page);
  std::span<const int32_t> tokens_of(std::span<const int32_t> token_ids, int64_t page) const;

  int page_size_;
  std::vector<int32_t> free_;        // a stack: the page released last is reused first, while still in the
                                     // CPU's caches
  std::vector<int32_t> references_;  // [num_pages]: number of tables that contain the page
  PrefixTree tree_;                  // the published pages
  int64_t num_used_ = 0, num_references_ = 0;
  int64_t time_ = 0;  // counts releases
};

}  // namespace fp4moe
