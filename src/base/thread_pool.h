// ThreadPool: a fixed set of workers that share the chunks of a loop.
#pragma once

#include <cstdint>
#include <memory>

namespace fp4moe {

// Chunks are handed out dynamically, so a slow core takes fewer of them. A chunk's result must not depend on
// the worker that runs it, so that results are the same for any number of workers. Between loops workers spin
// for 50 microseconds, then sleep, so an idle engine uses no CPU. Threads are not pinned, but move apart if
// two of them share a CPU. If another process keeps some cores busy, the pool uses the remaining ones. The
// process's CPU affinity is respected and not changed.
class ThreadPool {
 public:
  // num_threads >= 1 workers, including run()'s caller. If threads cannot be created, logs a warning and has
  // fewer workers.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;
  // Calls body(chunk, worker) once for each chunk in [0, num_chunks), worker in [0, num_threads()); returns
  // when all chunks are done. One run() at a time; body must not call run() of the same pool. If calls throw,
  // the chunks not yet begun are skipped, and run() throws the first of their exceptions once no worker is in
  // a chunk.
  template <class Body>
  void run(int64_t num_chunks, const Body& body) {
    run_loop({&body,
              [](const void* b, int64_t chunk, int worker) { (*static_cast<const Body*>(b))(chunk, worker); },
              num_chunks});
  }

 private:
  struct Loop {  // refers to run()'s body, so nothing is allocated
    const void* body = nullptr;
    void (*call)(const void* body, int64_t chunk, int worker) = nullptr;
    int64_t num_chunks = 0;
  };
  void run_loop(const Loop& loop);
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fp4moe
