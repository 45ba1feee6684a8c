// GPU timing: work recorded as a graph, with events around each replay.
#pragma once

#include <functional>

#include "bench/bench_spread.h"
#include "device/device.h"
#include "device/device_context.h"
#include "device/stream.h"
#include "fp4moe/status.h"

namespace fp4moe {

// Microseconds of one replay of a graph of `work`: `repeats` replays after three warm-up replays.
Result<Spread> time_graph(Stream& stream, const std::function<Status()>& work, int repeats);

// The ordinal of the GPU for CUDA benches.
inline const int kBenchGpu = gpu_of_rank(0);
// That GPU: kUnsupported if there is none or if it is not a Hopper; the message names the device.
Result<DeviceContext*> bench_gpu();

}  // namespace fp4moe
