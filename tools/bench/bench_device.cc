#include "bench/bench_device.h"

#include <string>
#include <utility>
#include <vector>

#include "device/event.h"
#include "device/graph.h"

namespace fp4moe {

Result<Spread> time_graph(Stream& stream, const std::function<Status()>& work, int repeats) {
  constexpr int kWarmups = 3;
  auto graph = Graph::capture(stream, work);
  if (!graph.ok()) return graph.status();
  std::vector<Event> starts, ends;
  for (int r = 0; r < repeats; ++r) {
    auto start = Event::make();
    if (!start.ok()) return start.status();
    auto end = Event::make();
    if (!end.ok()) return end.status();
    starts.push_back(std::move(start).value());
    ends.push_back(std::move(end).value());
  }
  for (int w = 0; w < kWarmups; ++w) graph->launch(stream);
  for (int r = 0; r < repeats; ++r) {
    starts[static_cast<size_t>(r)].record(stream);
    graph->launch(stream);
    ends[static_cast<size_t>(r)].record(stream);
  }
  if (Status status = stream.synchronize(); !status.ok()) return status;
  std::vector<double> times;
  for (size_t r = 0; r < starts.size(); ++r) {
    const auto us = ends[r].microseconds_since(starts[r]);
    if (!us.ok()) return us.status();
    times.push_back(*us);
  }
  return spread_of(std::move(times));
}

Result<DeviceContext*> bench_gpu() {
  const Result<DeviceContext*> gpu = DeviceContext::of(kBenchGpu);
  if (!gpu.ok()) return gpu.status().with_context("device=cuda (--device cpu measures the CPU)");
  const DeviceInfo& info = (*gpu)->info();
  if (info.compute_major() != 9)
    return unsupported("device=cuda: " + info.name + " is sm_" + std::to_string(info.compute_capability) +
                       "; this benchmark requires a Hopper GPU (sm_90), or --device cpu");
  return gpu;
}

}  // namespace fp4moe
