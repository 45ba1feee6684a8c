// PagePool: which pages of the KV cache are free, which belong to sequences' page tables, and which hold
// prefixes of past requests for the next one that begins alike.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/prefix_tree.h"

namespace fp4moe {

// Single-threaded. Every page is exactly one of free, used (in one or more tables) and cached (in no table,
// but its tokens are known); more than one table has it only if its tokens are known. Double frees, foreign
// pages and leaks (used pages at destruction) are CHECKed.
class PagePool {
 public:
  PagePool(int64_t num_pages, int page_size);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // Grows `page_table` until it covers num_tokens, by free pages, then by the cached ones that were let go
  // first. False, and nothing has changed, if these are too few.
  bool grow(std::vector<int32_t>& page_table, int64_t num_tokens);
  // Gives all pages of `page_table` back and empties it: those whose tokens are known, to the cache.
  void release(std::vector<int32_t>& page_table);

  // The known pages that hold the beginning of `token_ids`.
  struct Prefix {
    int64_t num_pages = 0;
    int64_t num_cached = 0;  // of them; the others are used
  };
  Prefix find_prefix(std::span<const int32_t> token_ids) const;
  // Puts these pages into `page_table`, which is empty.
  void take_prefix(std::span<const int32_t> token_ids, std::vector<int32_t>& page_table);
  // Makes known that the first pages of `page_table` hold `token_ids`, which fill all but the last of them;
  // of the first num_known pages it is known. Where another page holds the same, the table gets that one
  // instead. Returns how many are known now.
  int64_t make_known(std::span<const int32_t> token_ids, std::vector<int32_t>& page_table, int64_t num_known);
  // Forgets the tokens of the pages that this table alone has, and behind which nothing is known.
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
  void let_go(int32_t page);
  std::span<const int32_t> tokens_of(std::span<const int32_t> token_ids, int64_t page) const;

  int page_size_;
  std::vector<int32_t> free_;        // a stack: the page released last is taken first, while it is warm
  std::vector<int32_t> references_;  // [num_pages]: tables that have it
  PrefixTree tree_;                  // the pages whose tokens are known
  int64_t num_used_ = 0, num_references_ = 0;
  int64_t time_ = 0;  // counts releases
};

}  // namespace fp4moe
