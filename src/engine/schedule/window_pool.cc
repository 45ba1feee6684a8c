#include "engine/schedule/window_pool.h"

#include <string>

#include "base/check.h"

namespace fp4moe {

WindowPool::WindowPool(int64_t num_pages, int64_t num_nodes)
    : references_(num_pages),
      states_(static_cast<size_t>(num_pages)),
      page_of_(static_cast<size_t>(num_pages > 0 ? num_nodes : 0), kNone) {}

std::tuple<bool, int64_t, int32_t> WindowPool::place_of(int32_t page) const {
  const State& state = states_[static_cast<size_t>(page)];
  return {!state.is_passed, state.time, page};
}

int32_t WindowPool::allocate() {
  if (references_.num_free() == 0) evict_oldest();
  const int32_t page = references_.take_free();
  states_[static_cast<size_t>(page)] = {};
  references_.refer(page);
  return page;
}

void WindowPool::evict_oldest() {
  FP4MOE_CHECK(!evictable_.empty(), "no window page is cached");
  detach(states_[static_cast<size_t>(std::get<2>(*evictable_.begin()))].node);
}

void WindowPool::share(int32_t page) {
  if (references_.refer(page)) evictable_.erase(place_of(page));
  states_[static_cast<size_t>(page)].was_shared = true;
}

void WindowPool::release(int32_t page, int64_t time, bool left_window) {
  if (!references_.release(page)) return;
  State& state = states_[static_cast<size_t>(page)];
  if (state.node == kNone) return references_.put_free(page);
  state.is_passed = left_window && !state.was_shared;
  state.time = time;
  evictable_.insert(place_of(page));
}

void WindowPool::attach(int32_t page, int32_t node) {
  FP4MOE_CHECK(is_used(page) && states_[static_cast<size_t>(page)].node == kNone && page_of(node) == kNone,
               "window page " + std::to_string(page) + " cannot be that of node " + std::to_string(node));
  states_[static_cast<size_t>(page)].node = node;
  page_of_[static_cast<size_t>(node)] = page;
}

void WindowPool::detach(int32_t node) {
  const int32_t page = page_of(node);
  if (page == kNone) return;
  page_of_[static_cast<size_t>(node)] = kNone;
  if (!is_used(page)) {
    evictable_.erase(place_of(page));
    references_.put_free(page);
  }
  states_[static_cast<size_t>(page)].node = kNone;
}

void WindowPool::flush() {
  while (!evictable_.empty()) evict_oldest();
}

}  // namespace fp4moe
