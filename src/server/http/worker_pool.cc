#include "server/http/worker_pool.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace fp4moe {

namespace {

// Nice values. If the engine uses all cores, a large task still gets about a tenth of one.
constexpr int kSmallTaskNice = 5, kLargeTaskNice = 10;

}  // namespace

int WorkerPool::default_threads() {
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 4, kMinThreads, 8);
}

WorkerPool::WorkerPool(int num_threads) {
  for (int i = 0; i < std::clamp(num_threads, kMinThreads, kMaxThreads); ++i)
    threads_.emplace_back([this, is_small_only = i == 0] { run(is_small_only); });
}

bool WorkerPool::add(std::function<void()> task, bool is_small) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return false;
    (is_small ? small_ : large_).push_back({num_added_++, std::move(task)});
  }
  changed_.notify_all();  // notify_one() could wake the thread that runs small tasks only
  return true;
}

void WorkerPool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  std::lock_guard<std::mutex> lock(join_mutex_);
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

std::deque<WorkerPool::Task>* WorkerPool::next_queue(bool is_small_only) {
  if (is_small_only || large_.empty()) return small_.empty() ? nullptr : &small_;
  return small_.empty() || large_.front().ordinal < small_.front().ordinal ? &large_ : &small_;
}

void WorkerPool::run(bool is_small_only) {
  setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), is_small_only ? kSmallTaskNice : kLargeTaskNice);
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    std::deque<Task>* queue = nullptr;
    changed_.wait(lock, [&] {
      queue = next_queue(is_small_only);
      return queue != nullptr || stopping_;
    });
    if (queue == nullptr) return;
    std::function<void()> task = std::move(queue->front().run);
    queue->pop_front();
    lock.unlock();
    task();
    task = nullptr;  // destroy the captures without the lock
    lock.lock();
  }
}

}  // namespace fp4moe
