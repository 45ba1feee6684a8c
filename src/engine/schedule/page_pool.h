// PagePool: tracks which KV pages are free, used by sequences' page tables, or cached as prefixes of past
// requests.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/schedule/page_references.h"
#include "engine/schedule/prefix_tree.h"
#include "engine/schedule/state_pool.h"
#include "engine/schedule/window_pool.h"
#include "model/kv_window.h"
#include "model/page_tables.h"

namespace fp4moe {

struct PoolShape {
  int64_t num_pages = 0;
  int page_size = 1;
  int64_t num_window_pages = 0;  // pages of window layers; 0: the model has no such layers
  int64_t window = 0;            // in tokens, as in KvWindow
  int64_t num_slots = 0;         // of states, with slot 0; 0: the model has no states
};

// Single-threaded. Every page is in exactly one state: free, used (in one or more tables) or cached (in no
// table, but published with its tokens). Only published pages can be in more than one table. A double free, a
// foreign page or a leak (a page that is still used at destruction) fails a CHECK. Window pages have the same
// states; one is published with the full page of the same tokens, and evicted with it or before it. So is a
// state's snapshot, which belongs to the full page at whose end it was taken.
//
// Large because each operation changes the pages of both groups of layers; a third of the methods are
// one-line queries.
class PagePool {
 public:
  explicit PagePool(const PoolShape& shape);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // Grows tables.full until it covers num_tokens, from free pages first, then by evicting the least recently
  // released cached pages. Returns false and changes nothing if free and cached pages together are too few.
  bool grow(PageTables& tables, int64_t num_tokens);
  // Does the same for tables.window, from first_window on.
  bool grow_window(PageTables& tables, int64_t num_tokens);
  // Releases the window pages that no token from `position` on needs (KvWindow::first_page). If the table
  // ends before the first page that is needed, it is extended up to that page by entries without pages.
  void leave_window(PageTables& tables, int64_t position);
  // Empties both tables. Those of their pages that are in no other table become cached if they are published,
  // otherwise free.
  void release(PageTables& tables);

  // The longest prefix of `token_ids` from which a sequence can continue: all its pages are published, and
  // those before its end that window layers need still have their window pages, and the last one has a
  // snapshot if the model has states and the sequence needs one.
  struct Prefix {
    int64_t num_pages = 0;
    int64_t num_cached = 0;   // cached pages among them; the rest are used
    int64_t num_matched = 0;  // pages with the same tokens, whether or not a sequence can continue from them
  };
  Prefix find_prefix(std::span<const int32_t> token_ids, bool needs_snapshot = true) const;
  // Appends these pages to `tables`, which must be empty.
  void take_prefix(std::span<const int32_t> token_ids, PageTables& tables, bool needs_snapshot = true);
  // Publishes the pages of `tables` that `token_ids` fills completely; the first num_published pages are
  // already published. If another page already holds the same tokens, the table gets that page instead.
  // Returns the new number of published pages.
  int64_t publish_prefix(std::span<const int32_t> token_ids, PageTables& tables, int64_t num_published);
  // Unpublishes the trailing pages of these tables that are in no other table and are not followed by a
  // published page.
  void forget(const PageTables& tables);
  // Frees all cached pages and snapshots.
  void flush();
  StatePool& states() { return states_; }
  const StatePool& states() const { return states_; }

  int64_t pages_for(int64_t num_tokens) const { return (num_tokens + page_size() - 1) / page_size(); }
  int64_t num_pages() const { return references_.num_pages(); }
  int64_t num_free() const { return references_.num_free(); }
  int64_t num_cached() const { return tree_.num_idle(); }
  int64_t num_used() const { return references_.num_used(); }
  int64_t num_available() const { return num_free() + num_cached(); }
  int64_t num_references() const { return references_.num_references(); }  // entries of all tables
  int page_size() const { return window_.page_size; }
  const KvWindow& window() const { return window_; }
  // Window pages.
  bool has_window() const { return window_.tokens > 0; }
  const WindowPool& window_pages() const { return window_pages_; }
  int64_t num_window_pages() const { return window_pages_.references().num_pages(); }
  int64_t num_window_free() const { return window_pages_.references().num_free(); }
  int64_t num_window_cached() const { return window_pages_.num_cached(); }
  int64_t num_window_used() const { return window_pages_.references().num_used(); }

 private:
  void refer(int32_t page);
  void release_page(int32_t page);
  int32_t evict();
  std::vector<int32_t> match(std::span<const int32_t> token_ids, bool needs_snapshot,
                             int64_t* num_matched = nullptr) const;
  void publish_window(PageTables& tables, int64_t index);
  std::span<const int32_t> tokens_of(std::span<const int32_t> token_ids, int64_t page) const;

  KvWindow window_;
  PageReferences references_;  // of full pages
  PrefixTree tree_;            // the published full pages
  WindowPool window_pages_;
  StatePool states_;
  int64_t time_ = 0;  // counts releases
};

}  // namespace fp4moe
