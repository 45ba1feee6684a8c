// PagePool: which pages of the KV cache are free, and which belong to a sequence's page table.
#pragma once

#include <cstdint>
#include <vector>

namespace fp4moe {

// Single-threaded. Every page is either free or in exactly one table: double frees, foreign pages and
// leaks (pages not back at destruction) are CHECKed.
class PagePool {
 public:
  PagePool(int64_t num_pages, int page_size);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // Grows `page_table` until it covers num_tokens. False, and nothing has changed, if too few pages are free.
  bool grow(std::vector<int32_t>& page_table, int64_t num_tokens);
  // Gives all pages of `page_table` back and empties it.
  void release(std::vector<int32_t>& page_table);

  int64_t pages_for(int64_t num_tokens) const { return (num_tokens + page_size_ - 1) / page_size_; }
  int64_t num_pages() const { return static_cast<int64_t>(taken_.size()); }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  int page_size() const { return page_size_; }

 private:
  int page_size_;
  std::vector<int32_t> free_;  // a stack: the page released last is taken first, while it is warm
  std::vector<bool> taken_;    // [num_pages]
};

}  // namespace fp4moe
