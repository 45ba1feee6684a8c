#include "base/thread_pool.h"

#include <atomic>
#include <chrono>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/log.h"

namespace fp4moe {
namespace {

constexpr int kSpinMicroseconds = 50;

void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Spins for a while until done() holds; false if it still does not.
template <class Done>
bool spin_until(const Done& done) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(kSpinMicroseconds);
  do {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      cpu_pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return done();
}

}  // namespace

// A worker joins a loop by raising `gate`, and only while the loop is open; the caller closes the gate when
// no chunk is left and waits for those inside. A worker that wakes up late, or not at all because another
// process has its core, is not waited for.
struct ThreadPool::State {
  static constexpr uint32_t kOpen = 1u << 31;

  std::vector<std::thread> threads;
  std::atomic<bool> stop{false};
  Loop loop;                                   // written before the gate opens, read by those inside
  alignas(64) std::atomic<uint32_t> epoch{0};  // raised for each loop; sleeping workers wait on it
  alignas(64) std::atomic<uint32_t> gate{0};   // kOpen + the number of workers inside
  alignas(64) std::atomic<int64_t> next_chunk{0};

  void drain_chunks(int worker) {
    for (int64_t c; (c = next_chunk.fetch_add(1, std::memory_order_relaxed)) < loop.num_chunks;)
      loop.call(loop.body, c, worker);
  }

  void work(int worker) {
    for (uint32_t seen = 0;;) {
      if (!spin_until([&] { return epoch.load(std::memory_order_acquire) != seen; }))
        epoch.wait(seen, std::memory_order_acquire);
      seen = epoch.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_relaxed)) return;
      if (gate.fetch_add(1, std::memory_order_acquire) & kOpen) drain_chunks(worker);
      if (gate.fetch_sub(1, std::memory_order_release) == 1) gate.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int num_threads) : state_(std::make_unique<State>()) {
  FP4MOE_CHECK(num_threads >= 1, "num_threads=" + std::to_string(num_threads));
  state_->threads.reserve(static_cast<size_t>(num_threads) - 1);
  try {
    for (int w = 1; w < num_threads; ++w) state_->threads.emplace_back([s = state_.get(), w] { s->work(w); });
  } catch (const std::exception& error) {  // results do not depend on the number of workers
    log_warning("the system refused worker " + std::to_string(state_->threads.size() + 1) + " of " +
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
  s.loop = loop;
  s.next_chunk.store(0, std::memory_order_relaxed);
  s.gate.fetch_or(State::kOpen, std::memory_order_release);
  s.epoch.fetch_add(1, std::memory_order_release);
  s.epoch.notify_all();
  s.drain_chunks(0);
  s.gate.fetch_and(~State::kOpen, std::memory_order_relaxed);
  while (!spin_until([&] { return s.gate.load(std::memory_order_acquire) == 0; })) {
    const uint32_t inside = s.gate.load(std::memory_order_acquire);
    if (inside != 0) s.gate.wait(inside, std::memory_order_acquire);
  }
}

}  // namespace fp4moe
