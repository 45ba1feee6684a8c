#include "base/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "base/thread_cpu.h"

namespace fp4moe {
namespace {

constexpr int kSpinMicroseconds = 50;

void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Spins until done() returns true; returns false if it does not within the given time.
template <class Done>
bool spin_until(const Done& done, int microseconds = kSpinMicroseconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(microseconds);
  do {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      cpu_pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return done();
}

// A worker's thread and its CPU.
class alignas(64) Worker {
 public:
  // Called by the worker: begin() first, enter() and leave() around its chunks.
  void begin() { thread_ = ThreadCpu::current(); }
  void enter() { is_inside_.store(true, std::memory_order_release); }
  void leave() { is_inside_.store(false, std::memory_order_release); }

  // Called by the loop's caller: returns whether the worker is inside a chunk but not running.
  bool is_preempted() const {
    constexpr int kWatchMicroseconds = 10;
    const auto has_left = [this] { return !is_inside_.load(std::memory_order_acquire); };
    if (has_left()) return false;
    const int64_t before = thread_.run_nanoseconds();
    if (spin_until(has_left, kWatchMicroseconds)) return false;
    return thread_.run_nanoseconds() - before < kWatchMicroseconds * 1000 / 3;
  }
  // Called by the loop's caller: migrates the worker from CPU `home` to the caller's, `here`.
  void bring(int here, int home) {
    if (!moving_.try_lock()) return;  // the worker is migrating itself
    home_.store(home, std::memory_order_relaxed);
    thread_.move_to(here);
    moving_.unlock();
  }
  // Called by the worker outside its chunks: returns to its CPU if bring() moved it away.
  void go_home() {
    if (home_.load(std::memory_order_relaxed) >= 0) move_to(home_.exchange(-1, std::memory_order_relaxed));
  }
  void move_to(int cpu) {
    const std::lock_guard lock(moving_);
    thread_.move_to(cpu);
  }
  // Empty if unknown.
  std::vector<int> allowed_cpus() const noexcept {
    try {
      return thread_.allowed();
    } catch (const std::bad_alloc&) {
      return {};
    }
  }

 private:
  ThreadCpu thread_;
  std::atomic<bool> is_inside_{false};
  std::atomic<int> home_{-1};  // the CPU from which bring() moved it; -1: it was not moved
  std::mutex moving_;
};

}  // namespace

// A worker joins a loop by incrementing `gate`, and only while the gate is open. When no chunk is left the
// caller closes the gate and waits for the workers inside. It does not wait for a worker that wakes up late,
// or that does not wake up because another process occupies its core.
//
// The caller must wait for a worker that is preempted inside a chunk. The other process's time slice is as
// long as a hundred chunks, so the caller migrates that worker to its own core. A worker that wakes up on
// another worker's core, which happens if no core is idle, moves to a core that no worker uses: Linux would
// leave both on one core indefinitely.
struct ThreadPool::State {
  static constexpr uint32_t kOpen = 1u << 31;

  explicit State(int num_threads)
      : workers(static_cast<size_t>(num_threads)), cpus(static_cast<size_t>(num_threads)) {
    for (auto& cpu : cpus) cpu = -1;
  }

  std::vector<std::thread> threads;
  std::vector<Worker> workers;         // [0] is run()'s caller and is never migrated
  std::vector<std::atomic<int>> cpus;  // the CPU on which each worker last joined; -1: none yet
  std::atomic<bool> stop{false};
  Loop loop;                                   // written before the gate opens, read by the workers inside
  alignas(64) std::atomic<uint32_t> epoch{0};  // incremented for each loop; sleeping workers wait on it
  alignas(64) std::atomic<uint32_t> gate{0};   // kOpen + the number of workers inside
  alignas(64) std::atomic<int64_t> next_chunk{0};
  std::atomic<bool> has_thrown{false};
  std::exception_ptr thrown;  // by the worker that set has_thrown

  void drain_chunks(int worker) noexcept {
    try {
      for (int64_t c; (c = next_chunk.fetch_add(1, std::memory_order_relaxed)) < loop.num_chunks;)
        loop.call(loop.body, c, worker);
    } catch (...) {
      next_chunk.store(loop.num_chunks, std::memory_order_relaxed);
      if (!has_thrown.exchange(true)) thrown = std::current_exception();
    }
  }

  // Stores the worker's CPU only if it has changed, because the other workers read it in each loop.
  void note_cpu(size_t worker) {
    const int cpu = current_cpu();
    if (cpus[worker].load(std::memory_order_relaxed) != cpu)
      cpus[worker].store(cpu, std::memory_order_relaxed);
  }

  // Whether one of the first `count` workers is on `cpu`.
  bool is_taken(int cpu, size_t count) const {
    return std::any_of(cpus.begin(), cpus.begin() + static_cast<std::ptrdiff_t>(count),
                       [cpu](const auto& c) { return c.load(std::memory_order_relaxed) == cpu; });
  }

  // If two workers share a CPU, the higher-numbered one migrates to a free allowed CPU, if there is one.
  void find_cpu(size_t worker) {
    note_cpu(worker);
    if (!is_taken(cpus[worker].load(std::memory_order_relaxed), worker)) return;
    for (const int cpu : workers[worker].allowed_cpus()) {
      if (is_taken(cpu, cpus.size())) continue;
      workers[worker].move_to(cpu);
      return note_cpu(worker);
    }
  }

  // Called by the loop's caller, which is idle until all workers have left.
  void lend_cpu() {
    for (size_t w = 1; w < workers.size(); ++w)
      if (workers[w].is_preempted()) workers[w].bring(current_cpu(), cpus[w].load(std::memory_order_relaxed));
  }

  void work(size_t worker) {
    Worker& self = workers[worker];
    self.begin();
    for (uint32_t seen = 0;;) {
      if (!spin_until([&] { return epoch.load(std::memory_order_acquire) != seen; }))
        epoch.wait(seen, std::memory_order_acquire);
      seen = epoch.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_relaxed)) return;
      find_cpu(worker);
      self.enter();
      if (gate.fetch_add(1, std::memory_order_acquire) & kOpen) drain_chunks(static_cast<int>(worker));
      self.leave();
      if (gate.fetch_sub(1, std::memory_order_release) == 1) gate.notify_one();
      self.go_home();
    }
  }
};

ThreadPool::ThreadPool(int num_threads) {
  FP4MOE_CHECK(num_threads >= 1, "num_threads=" + std::to_string(num_threads));
  state_ = std::make_unique<State>(num_threads);
  state_->threads.reserve(state_->workers.size() - 1);
  try {
    for (size_t w = 1; w < state_->workers.size(); ++w)
      state_->threads.emplace_back([s = state_.get(), w] { s->work(w); });
  } catch (const std::exception& error) {  // results do not depend on the number of workers
    log_warning("cannot start worker thread " + std::to_string(state_->threads.size() + 1) + " of " +
                std::to_string(num_threads) + ": " + error.what());
  }
}

ThreadPool::~ThreadPool() {
  state_->stop.store(true, std::memory_order_relaxed);
  state_->epoch.fetch_add(1, std::memory_order_release);
  state_->epoch.notify_all();
  for (std::thread& t : state_->threads) t.join();
}

int ThreadPool::num_threads() const { return static_cast<int>(state_->threads.size()) + 1; }

void ThreadPool::run_loop(const Loop& loop) {
  State& s = *state_;
  if (loop.num_chunks <= 1 || s.threads.empty()) {
    for (int64_t c = 0; c < loop.num_chunks; ++c) loop.call(loop.body, c, 0);
    return;
  }
  s.note_cpu(0);
  s.loop = loop;
  s.next_chunk.store(0, std::memory_order_relaxed);
  s.gate.fetch_or(State::kOpen, std::memory_order_release);
  s.epoch.fetch_add(1, std::memory_order_release);
  s.epoch.notify_all();
  s.drain_chunks(0);
  s.gate.fetch_and(~State::kOpen, std::memory_order_relaxed);
  while (!spin_until([&] { return s.gate.load(std::memory_order_acquire) == 0; })) {
    s.lend_cpu();
    const uint32_t inside = s.gate.load(std::memory_order_acquire);
    if (inside != 0) s.gate.wait(inside, std::memory_order_acquire);
  }
  if (s.has_thrown.exchange(false)) std::rethrow_exception(std::exchange(s.thrown, nullptr));
}

}  // namespace fp4moe
