// ThreadPool: a fixed set of workers that split loops into chunks.
#pragma once

#include <cstdint>
#include <memory>

namespace fp4moe {

// Chunks are handed out dynamically, so a slow core takes fewer of them; a chunk's result must not
// depend on the worker that runs it, which makes results the same for every number of workers.
// Between loops workers spin for some tens of microseconds, then sleep in the kernel, so an idle engine
// costs nothing. Threads are not pinned, but keep out of each other's way where the system does not; beside a
// busy process the pool has what is left of the cores. Which CPUs the process may use is respected, and left
// as it is.
class ThreadPool {
 public:
  // num_threads >= 1 workers, run()'s caller one of them; fewer, with a warning, if the system refuses.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;
  // Calls body(chunk, worker) once for each chunk in [0, num_chunks), worker in [0, num_threads());
  // returns when all are done. One run() at a time; body must not call run() of the same pool.
  template <class Body>
  void run(int64_t num_chunks, const Body& body) {
    run_loop({&body,
              [](const void* b, int64_t chunk, int worker) { (*static_cast<const Body*>(b))(chunk, worker); },
              num_chunks});
  }

 private:
  struct Loop {  // borrowed for the time of run(), so nothing is allocated
    const void* body = nullptr;
    void (*call)(const void* body, int64_t chunk, int worker) = nullptr;
    int64_t num_chunks = 0;
  };
  void run_loop(const Loop& loop);
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fp4moe
