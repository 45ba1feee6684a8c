// Timing on a GPU: work recorded in a graph, events round each replay.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "device/device_info.h"
#include "device/stream.h"
#include "fp4moe/status.h"

namespace fp4moe {

// The middle and the tenths of measured values.
struct Spread {
  double median = 0, p10 = 0, p90 = 0;
};
Spread spread_of(std::vector<double> values);  // not empty

// Microseconds of one replay of a graph of `work`; `repeats` replays after three that do not count.
Result<Spread> time_graph(Stream& stream, const std::function<Status()>& work, int repeats);

// The GPU that CUDA benches run on: kUnsupported for any --device but cuda, without a GPU, and for one that
// is no Hopper, each naming what is.
Result<DeviceInfo> bench_gpu(const std::string& device);

}  // namespace fp4moe
