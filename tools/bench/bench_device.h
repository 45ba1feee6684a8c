// GPU timing: records work as a graph, with events around each replay.
#pragma once

#include <functional>

#include "bench/bench_spread.h"
#include "device/device.h"
#include "device/device_context.h"
#include "device/stream.h"
#include "fp4moe/status.h"

namespace fp4moe {

// Returns the microseconds per replay of a graph of `work`, over `repeats` replays after three warm-up
// replays.
Result<Spread> time_graph(Stream& stream, const std::function<Status()>& work, int repeats);

// The ordinal of the GPU that CUDA benchmarks use.
inline const int kBenchGpu = gpu_of_rank(0);
// Returns that GPU. kUnsupported: there is no GPU, or it is not a Hopper GPU.
Result<DeviceContext*> bench_gpu();

}  // namespace fp4moe
