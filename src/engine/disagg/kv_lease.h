// KvLease: the KV pages of one sequence while a thread other than the engine's reads or fills them.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "engine/disagg/kv_wire.h"
#include "engine/ranks/executor.h"

namespace fp4moe {

// The engine's thread creates the lease and ends it before the pages return to the pool. Until then no step
// writes to the pages or uses pages that are being filled. Any other thread can call read() and write().
class KvLease {
 public:
  KvLease(Executor& executor, int group, std::vector<int32_t> pages, int64_t num_tokens)
      : executor_(executor), group_(group), pages_(std::move(pages)), num_tokens_(num_tokens) {}

  KvPageShape shape() const { return {num_tokens_, executor_.kv_token_bytes(), executor_.page_size()}; }
  // Reads a page in canonical form. kCancelled if the lease has ended (nothing was copied); otherwise the
  // executor's errors.
  Status read(int64_t index, std::span<uint8_t> canonical) {
    std::lock_guard lock(mutex_);
    if (ended_) return cancelled("the lease has ended");
    return executor_.read_page(group_, pages_[static_cast<size_t>(index)], shape().tokens_of(index),
                               canonical.data());
  }
  Status write(int64_t index, std::span<const uint8_t> canonical) {
    std::lock_guard lock(mutex_);
    if (ended_) return cancelled("the lease has ended");
    return executor_.write_page(group_, pages_[static_cast<size_t>(index)], shape().tokens_of(index),
                                canonical.data());
  }
  // Waits for a page transfer in progress; later ones fail.
  void end() {
    std::lock_guard lock(mutex_);
    ended_ = true;
  }

 private:
  Executor& executor_;
  const int group_;
  const std::vector<int32_t> pages_;
  const int64_t num_tokens_;
  std::mutex mutex_;
  bool ended_ = false;
};

}  // namespace fp4moe
