// Timing on a GPU: work recorded in a graph, events round each replay.
#pragma once

#include <functional>

#include "bench_spread.h"
#include "device/device_info.h"
#include "device/stream.h"
#include "fp4moe/status.h"

namespace fp4moe {

// Microseconds of one replay of a graph of `work`; `repeats` replays after three that do not count.
Result<Spread> time_graph(Stream& stream, const std::function<Status()>& work, int repeats);

// The GPU that CUDA benches run on: kUnsupported without a GPU, and for one that is no Hopper, each naming
// what is.
Result<DeviceInfo> bench_gpu();

}  // namespace fp4moe
