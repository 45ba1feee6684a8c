#include "engine/page_pool.h"

#include <limits>
#include <string>

#include "base/check.h"

namespace fp4moe {

PagePool::PagePool(int64_t num_pages, int page_size) : page_size_(page_size) {
  FP4MOE_CHECK(num_pages >= 0 && num_pages <= std::numeric_limits<int32_t>::max(),
               "num_pages=" + std::to_string(num_pages));
  FP4MOE_CHECK(page_size >= 1, "page_size=" + std::to_string(page_size));
  taken_.assign(static_cast<size_t>(num_pages), false);
  free_.reserve(static_cast<size_t>(num_pages));
  for (int64_t page = num_pages - 1; page >= 0; --page) free_.push_back(static_cast<int32_t>(page));
}

PagePool::~PagePool() {
  FP4MOE_CHECK(num_free() == num_pages(), "leaked KV pages: " + std::to_string(num_free()) + " of " +
                                              std::to_string(num_pages()) + " are free");
}

bool PagePool::grow(std::vector<int32_t>& page_table, int64_t num_tokens) {
  const auto wanted = static_cast<size_t>(pages_for(num_tokens));
  if (wanted <= page_table.size()) return true;
  if (wanted - page_table.size() > free_.size()) return false;
  page_table.reserve(wanted);  // what may throw comes before what changes the pool
  while (page_table.size() < wanted) {
    const int32_t page = free_.back();
    free_.pop_back();
    taken_[static_cast<size_t>(page)] = true;
    page_table.push_back(page);
  }
  return true;
}

void PagePool::release(std::vector<int32_t>& page_table) {
  for (const int32_t page : page_table) {
    FP4MOE_CHECK(page >= 0 && page < num_pages() && taken_[static_cast<size_t>(page)],
                 "KV page " + std::to_string(page) + " of " + std::to_string(num_pages()) + " is not taken");
    taken_[static_cast<size_t>(page)] = false;
    free_.push_back(page);
  }
  page_table.clear();
}

}  // namespace fp4moe
