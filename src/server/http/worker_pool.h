// WorkerPool: threads for long work on requests: parsing, templates, tokenizing, printing large responses.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace fp4moe {

// The first thread runs small tasks only, so that they never wait for a large one; the others run the oldest
// task of either kind. All have a lower priority than the engine's threads, so that tokenizing does not slow
// down running streams.
class WorkerPool {
 public:
  static constexpr int kMinThreads = 2, kMaxThreads = 256;
  // A quarter of the hardware threads, clamped to 2..8.
  static int default_threads();

  explicit WorkerPool(int num_threads);
  ~WorkerPool() { stop(); }
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // False, and the task is discarded, after stop().
  bool add(std::function<void()> task, bool is_small);
  // Runs the queued tasks and joins the threads. Must not be called from a task.
  void stop();

 private:
  struct Task {
    uint64_t ordinal;
    std::function<void()> run;
  };
  void run(bool is_small_only);
  std::deque<Task>* next_queue(bool is_small_only);  // null: nothing to do

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> small_, large_;
  uint64_t num_added_ = 0;
  bool stopping_ = false;
  std::mutex join_mutex_;
  std::vector<std::thread> threads_;
};

}  // namespace fp4moe
