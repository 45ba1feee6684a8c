// KvLease: the KV pages and the state of one sequence while a thread other than the engine's reads or fills
// them.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/disagg/kv_wire.h"
#include "engine/ranks/executor.h"
#include "model/page_tables.h"

namespace fp4moe {

// Where a sequence's parts are. `slot`: of the state; 0: the model has no states.
struct KvPlace {
  int group = 0;
  PageTables tables;
  int32_t slot = 0;
};

// The engine's thread opens the lease's first parts (KvPageShape) once their content can be copied: on a
// prefill node while the prompt is computed, on a decode node all at once. It withdraws or ends the lease
// before the pages return to the pool, and the state's slot with them. Meanwhile no step writes to open parts
// or uses those that are being filled. Any other thread can call read(), write() and the queries; none of
// the engine's calls except withdraw() and end() waits for a copy.
class KvLease {
 public:
  // No part is open.
  KvLease(Executor& executor, int64_t num_tokens) : executor_(executor), num_tokens_(num_tokens) {}
  // All parts are open.
  KvLease(Executor& executor, KvPlace place, int64_t num_tokens);

  KvPageShape shape() const;
  // The number of parts from `first` on that are best copied together: pages, or one piece of the state.
  int64_t num_together(int64_t first) const;

  // ---- the engine's thread ----
  // Says where the parts are and that the first num_parts of them, and all that are open already, are
  // complete once the steps enqueued so far have ended. open_staged() opens them.
  void stage(KvPlace place, int64_t num_parts);
  void open_staged();
  void open_all(KvPlace place) {
    stage(std::move(place), shape().num_parts());
    open_staged();
  }
  // Closes all parts, because the pages return to the pool. They can be opened again in other pages.
  void withdraw();
  // Parts that are not open will not be: read() fails with the error for all parts.
  void fail(const Status& status);
  // Later copies fail.
  void end();

  // ---- other threads ----
  // Reads open parts of the transfer from `first` on in canonical form, each into its own memory: a page of
  // full layers and, from first_window_page on, that of window layers, or a piece of the state. Pieces are
  // read one at a time. kCancelled if a part is not open, or the lease has ended (nothing was copied);
  // otherwise the status of fail() or the executor's errors.
  Status read(int64_t first, std::span<const std::span<uint8_t>> parts);
  Status write(int64_t first, std::span<const std::span<const uint8_t>> parts);
  // The same for one part.
  Status read(int64_t index, std::span<uint8_t> canonical) {
    return read(index, std::span<const std::span<uint8_t>>(&canonical, 1));
  }
  Status write(int64_t index, std::span<const uint8_t> canonical) {
    return write(index, std::span<const std::span<const uint8_t>>(&canonical, 1));
  }
  // The number of open parts; if a read cannot succeed any more, std::nullopt.
  std::optional<int64_t> num_open() const;
  bool has_ended() const;
  // `on_change` is called, without locks, after parts were opened and after fail() and end().
  void watch(std::function<void()> on_change);

 private:
  // Where parts that are copied together are: pages, or one piece of the state.
  template <class PageCopy>
  struct Located {
    int group = 0;
    int32_t slot = 0;
    int64_t state_offset = 0;
    std::vector<PageCopy> pages;
  };
  template <class PageCopy, class Bytes>
  std::vector<PageCopy> pages_of(int64_t first, std::span<const Bytes> parts) const;
  template <class PageCopy, class Bytes>
  Result<Located<PageCopy>> locate(int64_t first, std::span<const Bytes> parts) const;
  Status check(int64_t end) const;
  void notify();

  Executor& executor_;
  const int64_t num_tokens_;
  std::mutex copying_;        // held during a copy; locked before mutex_
  mutable std::mutex mutex_;  // of everything below
  KvPlace place_, staged_;
  int64_t num_open_ = 0, num_staged_ = 0;  // num_staged_ = 0: nothing is staged
  bool ended_ = false;
  Status status_;
  std::function<void()> on_change_;
};

}  // namespace fp4moe
