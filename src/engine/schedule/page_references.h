// PageReferences: the free pages of one group of layers, and the number of page tables that contain each
// page.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "base/check.h"

namespace fp4moe {

// Single-threaded. A foreign page, or one page too many released, fails a CHECK.
class PageReferences {
 public:
  explicit PageReferences(int64_t num_pages) {
    FP4MOE_CHECK(num_pages >= 0 && num_pages <= std::numeric_limits<int32_t>::max(),
                 "num_pages=" + std::to_string(num_pages));
    counts_.assign(static_cast<size_t>(num_pages), 0);
    free_.reserve(counts_.size());
    for (int64_t page = num_pages - 1; page >= 0; --page) free_.push_back(static_cast<int32_t>(page));
  }

  // Removes the page that was freed last: it may still be in the CPU's caches. Requires a free page.
  int32_t take_free() {
    FP4MOE_CHECK(!free_.empty(), "no KV page is free");
    const int32_t page = free_.back();
    free_.pop_back();
    return page;
  }
  void put_free(int32_t page) { free_.push_back(page); }

  // Counts one more table with the page; returns whether it is the only one.
  bool refer(int32_t page) {
    ++num_references_;
    if (counts_[static_cast<size_t>(page)]++ > 0) return false;
    ++num_used_;
    return true;
  }
  // Counts one table less; returns whether it was the last.
  bool release(int32_t page) {
    FP4MOE_CHECK(page >= 0 && page < num_pages() && count(page) > 0,
                 "KV page " + std::to_string(page) + " of " + std::to_string(num_pages()) + " is not in use");
    --num_references_;
    if (--counts_[static_cast<size_t>(page)] > 0) return false;
    --num_used_;
    return true;
  }

  int32_t count(int32_t page) const { return counts_[static_cast<size_t>(page)]; }
  int64_t num_pages() const { return std::ssize(counts_); }
  int64_t num_free() const { return std::ssize(free_); }
  int64_t num_used() const { return num_used_; }
  int64_t num_references() const { return num_references_; }  // entries of all tables

 private:
  std::vector<int32_t> free_;    // a stack
  std::vector<int32_t> counts_;  // [num_pages]
  int64_t num_used_ = 0, num_references_ = 0;
};

}  // namespace fp4moe
