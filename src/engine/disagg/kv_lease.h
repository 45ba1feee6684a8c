// KvLease: the KV pages and the state of one sequence while a thread other than the engine's reads or fills
// them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "engine/disagg/kv_wire.h"
#include "engine/ranks/executor.h"
#include "model/page_tables.h"

namespace fp4moe {

// The engine's thread creates the lease and ends it before the pages return to the pool, and the state's slot
// with them. Until then no step writes to them or uses those that are being filled. Any other thread can call
// read() and write().
//
// A lease can begin closed, while a draft model still has to write its part of the pages: read() then waits
// until the engine's thread has opened or ended it.
class KvLease {
 public:
  // `slot`: of the state; 0: the model has no states.
  KvLease(Executor& executor, int group, PageTables tables, int32_t slot, int64_t num_tokens,
          bool is_open = true)
      : executor_(executor),
        group_(group),
        tables_(std::move(tables)),
        slot_(slot),
        num_tokens_(num_tokens),
        is_open_(is_open) {
    FP4MOE_CHECK(tables_.first_window <= shape().first_window_page,
                 "window page " + std::to_string(shape().first_window_page) + " has been released");
    FP4MOE_CHECK((slot_ != 0) == (shape().state_bytes > 0),
                 "slot " + std::to_string(slot_) + " for a state of " + std::to_string(shape().state_bytes) +
                     " bytes");
  }

  KvPageShape shape() const {
    return {.num_tokens = num_tokens_,
            .token_bytes = executor_.kv_token_bytes(),
            .page_size = executor_.page_size(),
            .window_token_bytes = executor_.window_token_bytes(),
            .first_window_page = executor_.window().first_page(num_tokens_),
            .state_bytes = executor_.state_bytes()};
  }
  // The number of parts from `first` on that are best copied together: pages, or one piece of the state.
  int64_t num_together(int64_t first) const {
    const KvPageShape of = shape();
    const int64_t most_bytes = executor_.page_batch_bytes();
    int64_t count = 1;
    for (int64_t bytes = of.bytes_of(first); of.is_page(first + count); ++count) {
      bytes += of.bytes_of(first + count);
      if (bytes > most_bytes) break;
    }
    return count;
  }
  // Reads parts of the transfer from `first` on in canonical form, each into its own memory: a page of full
  // layers and, from first_window_page on, that of window layers, or a piece of the state. Pieces are read
  // one at a time. kCancelled if the lease has ended (nothing was copied); otherwise the status of open() or
  // the executor's errors.
  Status read(int64_t first, std::span<const std::span<uint8_t>> parts) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_open_ || ended_; });
    if (ended_) return cancelled("the lease has ended");
    FP4MOE_RETURN_IF_ERROR(status_);
    if (const KvPageShape of = shape(); !of.is_page(first))
      return executor_.read_state(group_, slot_, of.state_offset(first), parts[0]);
    return executor_.read_pages(group_, pages_of<PageRead>(first, parts));
  }
  Status write(int64_t first, std::span<const std::span<const uint8_t>> parts) {
    std::lock_guard lock(mutex_);
    if (ended_) return cancelled("the lease has ended");
    if (const KvPageShape of = shape(); !of.is_page(first))
      return executor_.write_state(group_, slot_, of.state_offset(first), parts[0]);
    return executor_.write_pages(group_, pages_of<PageWrite>(first, parts));
  }
  // The same for one part.
  Status read(int64_t index, std::span<uint8_t> canonical) {
    return read(index, std::span<const std::span<uint8_t>>(&canonical, 1));
  }
  Status write(int64_t index, std::span<const uint8_t> canonical) {
    return write(index, std::span<const std::span<const uint8_t>>(&canonical, 1));
  }
  // An error makes every later read() fail with it.
  void open(Status status) {
    std::lock_guard lock(mutex_);
    is_open_ = true;
    status_ = std::move(status);
    changed_.notify_all();
  }
  // Waits for a copy in progress; later ones fail.
  void end() {
    std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }

 private:
  // Returns the pages of each group of layers, one part after the other.
  template <class PageCopy, class Bytes>
  std::vector<PageCopy> pages_of(int64_t first, std::span<const Bytes> parts) const {
    const KvPageShape of = shape();
    std::vector<PageCopy> pages;
    for (const Bytes& part : parts) {
      const int64_t index = first++, num_tokens = of.tokens_of(index);
      const auto page = static_cast<size_t>(index), full = static_cast<size_t>(num_tokens * of.token_bytes);
      pages.push_back({tables_.full[page], num_tokens, part.first(full)});
      if (of.has_window_page(index))
        pages.push_back({{tables_.window[page], KvLayers::kWindow}, num_tokens, part.subspan(full)});
    }
    return pages;
  }

  Executor& executor_;
  const int group_;
  const PageTables tables_;
  const int32_t slot_;
  const int64_t num_tokens_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_, ended_ = false;
  Status status_;
};

}  // namespace fp4moe
