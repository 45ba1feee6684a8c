// Shared by the GPU kernel benchmarks: must() ends the program on errors, BenchGpu prepares the first GPU,
// and median_us() times CUDA graphs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/check.h"
#include "device/device_context.h"
#include "device/device_memory.h"
#include "device/event.h"
#include "device/graph.h"
#include "device/stream.h"
#include "kernels/ops.h"

namespace fp4moe {

template <class T>
T must(Result<T> result) {
  FP4MOE_CHECK(result.ok(), result.status().message());
  return std::move(result).value();
}
inline void must(const Status& status) { FP4MOE_CHECK(status.ok(), status.message()); }

inline Buffer device_buffer(int64_t num_bytes) { return must(Buffer::make(num_bytes, device_memory())); }

// The first GPU, ready for dense ops on a stream that is the thread's current one.
struct BenchGpu {
  DeviceScope device{first()};
  Stream stream = must(Stream::make());
  StreamScope scope{stream};

  BenchGpu() { must(prepare_cuda_dense_ops()); }

 private:
  static DeviceContext& first() {
    FP4MOE_CHECK(cuda_dense_ops() != nullptr, "built without CUDA");
    return *must(DeviceContext::of(0));
  }
};

// Whether the command line has this name.
inline bool has(std::span<char*> names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

// Returns microseconds per call, measured on a graph of `num_calls` calls: the median of 20 replays after two
// warm-up replays. call(i) enqueues call i.
inline double median_us(Stream& stream, int64_t num_calls, const std::function<void(int64_t)>& call) {
  constexpr int kReplays = 20;
  call(0);  // creates resources that must not be created during the capture
  must(stream.synchronize());
  const Graph graph = must(Graph::capture(stream, [&] {
    for (int64_t i = 0; i < num_calls; ++i) call(i);
    return Status();
  }));
  Event begin = must(Event::make()), end = must(Event::make());
  std::vector<double> times;
  for (int i = -2; i < kReplays; ++i) {
    begin.record(stream);
    graph.launch(stream);
    end.record(stream);
    must(stream.synchronize());
    if (i >= 0) times.push_back(must(end.microseconds_since(begin)) / static_cast<double>(num_calls));
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace fp4moe
