// KvLease: the KV pages of one sequence, which another thread than the engine's reads or fills meanwhile.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "engine/executor.h"
#include "engine/kv_wire.h"

namespace fp4moe {

// The engine's thread makes it and ends it before the pages go back to the pool; until then no step writes to
// the pages, nor uses those that are filled. read() and write() from any other thread.
class KvLease {
 public:
  KvLease(Executor& executor, int group, std::vector<int32_t> pages, int64_t num_tokens)
      : executor_(executor), group_(group), pages_(std::move(pages)), num_tokens_(num_tokens) {}

  KvPageShape shape() const { return {num_tokens_, executor_.kv_token_bytes(), executor_.page_size()}; }
  // The page's canonical bytes. kCancelled, and nothing was done: the lease has ended. Else the executor's.
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
  // Waits for the page that is read or written now; none is afterwards.
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
