#include "device/graph.h"

#include <utility>

#ifdef FP4MOE_HAS_CUDA
#include "device/cuda_error.h"
#endif

namespace fp4moe {

Graph::Graph(Graph&& other) noexcept
    : handle_(std::exchange(other.handle_, nullptr)), num_nodes_(std::exchange(other.num_nodes_, 0)) {}

Graph& Graph::operator=(Graph&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(num_nodes_, other.num_nodes_);
  return *this;
}

#ifdef FP4MOE_HAS_CUDA

namespace {

// Captures `work` into `graph`, which may be null after an error.
Status record(Stream& stream, const std::function<Status()>& work, cudaGraph_t& graph) {
  cudaError_t error = cudaStreamBeginCapture(stream.handle(), cudaStreamCaptureModeThreadLocal);
  if (error != cudaSuccess) return cuda_failure("beginning a graph capture", error);
  Status failure;
  {
    StreamScope scope(stream);
    failure = work();
  }
  error = cudaStreamEndCapture(stream.handle(), &graph);
  const Status launch_failure = stream.take_failure();
  if (failure.ok()) failure = launch_failure;
  if (failure.ok() && error != cudaSuccess) failure = cuda_failure("ending a graph capture", error);
  if (!failure.ok()) cudaGetLastError();
  return failure;
}

}  // namespace

Result<Graph> Graph::capture(Stream& stream, const std::function<Status()>& work) {
  cudaGraph_t recorded = nullptr;
  Status failure = record(stream, work, recorded);
  Graph graph;
  if (failure.ok()) {
    size_t num_nodes = 0;
    cudaError_t error = cudaGraphGetNodes(recorded, nullptr, &num_nodes);
    if (error == cudaSuccess) error = cudaGraphInstantiate(&graph.handle_, recorded, 0);
    if (error == cudaSuccess) error = cudaGraphUpload(graph.handle_, stream.handle());
    if (error != cudaSuccess) failure = cuda_failure("graph", error);
    graph.num_nodes_ = static_cast<int64_t>(num_nodes);
  }
  if (recorded != nullptr) cudaGraphDestroy(recorded);
  if (!failure.ok()) return failure;
  return graph;
}

Graph::~Graph() {
  if (handle_ != nullptr) cudaGraphExecDestroy(handle_);
}

void Graph::launch(Stream& stream) const {
  const cudaError_t error = cudaGraphLaunch(handle_, stream.handle());
  if (error != cudaSuccess) stream.keep(cuda_failure("graph launch", error));
}

#else

Result<Graph> Graph::capture(Stream&, const std::function<Status()>&) {
  return unsupported("built without CUDA");
}
Graph::~Graph() = default;
void Graph::launch(Stream&) const {}

#endif

}  // namespace fp4moe
