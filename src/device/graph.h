// Graph: what a piece of work asks of a stream, recorded once and replayed as one launch.
#pragma once

#include <cstdint>
#include <functional>

#include "device/stream.h"
#include "fp4moe/status.h"

struct CUgraphExec_st;

namespace fp4moe {

class Graph {
 public:
  // Runs `work` with `stream` as this thread's current stream and records what it asks of it; nothing runs
  // on the device. The pointers and sizes that it passed are those of every replay. Other threads may use
  // the device meanwhile (thread-local capture). `work` must not allocate or free device memory or wait for
  // the device. Returns work's error, the first launch's, or kDoesNotFit if there is no memory for the graph.
  static Result<Graph> capture(Stream& stream, const std::function<Status()>& work);
  Graph() = default;
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&& other) noexcept;
  ~Graph();

  // Asks `stream` for all of it, in the order of its launches. What goes wrong is kept by the stream.
  void launch(Stream& stream) const;
  bool empty() const { return handle_ == nullptr; }
  int64_t num_nodes() const { return num_nodes_; }

 private:
  ::CUgraphExec_st* handle_ = nullptr;  // cudaGraphExec_t
  int64_t num_nodes_ = 0;
};

}  // namespace fp4moe
