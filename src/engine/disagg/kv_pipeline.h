// KvPipeline: a thread that handles items in order while its owner prepares the next ones, so that the copies
// of a transfer and its connection work at the same time.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/guarded.h"
#include "fp4moe/status.h"

namespace fp4moe {

// One thread, the owner's, calls put(), drain() and take_done(). At most kMaxWaiting items wait beside the
// one that is being handled, which bounds their memory.
template <class Item>
class KvPipeline {
 public:
  static constexpr size_t kMaxWaiting = 1;

  // `handle` is called on the pipeline's thread. After its first error, which put() and drain() return, no
  // further item is handled. Throws std::system_error if no thread can be created.
  explicit KvPipeline(std::function<Status(Item&)> handle)
      : handle_(std::move(handle)), thread_([this] { run(); }) {}
  // Waits until all items have been handled.
  ~KvPipeline() {
    {
      std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  KvPipeline(const KvPipeline&) = delete;
  KvPipeline& operator=(const KvPipeline&) = delete;

  // Waits while kMaxWaiting items wait.
  Status put(Item item) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return waiting_.size() < kMaxWaiting || !status_.ok(); });
    FP4MOE_RETURN_IF_ERROR(status_);
    waiting_.push_back(std::move(item));
    changed_.notify_all();
    return {};
  }
  // Waits until all items have been handled.
  Status drain() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_idle() || !status_.ok(); });
    return status_;
  }
  // The items handled since the last call, for their memory.
  std::vector<Item> take_done() {
    std::lock_guard lock(mutex_);
    return std::exchange(done_, {});
  }

 private:
  bool is_idle() const { return waiting_.empty() && !handling_; }

  void run() noexcept {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return ended_ || !waiting_.empty(); });
      if (waiting_.empty() || !status_.ok()) return;
      Item item = std::move(waiting_.front());
      waiting_.pop_front();
      handling_ = true;
      changed_.notify_all();
      lock.unlock();
      Status status = guarded([&] { return handle_(item); });
      lock.lock();
      handling_ = false;
      if (status.ok())
        status = guarded([&]() -> Status {
          done_.push_back(std::move(item));
          return {};
        });
      status_ = std::move(status);
      changed_.notify_all();
    }
  }

  const std::function<Status(Item&)> handle_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> waiting_;
  std::vector<Item> done_;
  bool handling_ = false, ended_ = false;
  Status status_;
  std::thread thread_;  // last: it uses the members above
};

}  // namespace fp4moe
