// Graph: work enqueued on a stream, captured once and replayed as one launch (a CUDA graph).
#pragma once

#include <cstdint>
#include <functional>

#include "device/stream.h"
#include "fp4moe/status.h"

struct CUgraphExec_st;

namespace fp4moe {

class Graph {
 public:
  // Runs `work` with `stream` as this thread's current stream, and the stream's GPU as its current GPU, and
  // captures what `work` enqueues; nothing runs on the device. Every replay uses the same pointers and sizes.
  // Other threads may use the device meanwhile, because the capture is thread-local. `work` must not allocate
  // or free device memory or wait for the device. Returns work's error, the first launch error, or
  // kDoesNotFit if there is no memory for the graph.
  static Result<Graph> capture(Stream& stream, const std::function<Status()>& work);
  Graph() = default;
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&& other) noexcept;
  ~Graph();

  // Enqueues the graph on `stream`, which keeps any error.
  void launch(Stream& stream) const;
  bool empty() const { return handle_ == nullptr; }
  int64_t num_nodes() const { return num_nodes_; }

 private:
  ::CUgraphExec_st* handle_ = nullptr;  // cudaGraphExec_t
  int64_t num_nodes_ = 0;
};

}  // namespace fp4moe
