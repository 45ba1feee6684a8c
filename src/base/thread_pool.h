// ThreadPool: a fixed set of workers that split loops into chunks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace fp4moe {

// Chunks are handed out dynamically, so a slow core takes fewer of them; a chunk's result must not
// depend on the worker that runs it, which makes results the same for every number of workers.
// Between loops workers spin for some tens of microseconds, then sleep in the kernel, so a busy
// neighbour on a core costs a time slice at most and an idle engine costs nothing.
class ThreadPool {
 public:
  // num_threads >= 1 workers, the caller of run() being one of them.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;
  // Calls body(chunk, worker) once for each chunk in [0, num_chunks), worker in [0, num_threads());
  // returns when all are done. One run() at a time; body must not call run() of the same pool.
  void run(int64_t num_chunks, const std::function<void(int64_t chunk, int worker)>& body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fp4moe
