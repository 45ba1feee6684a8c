// How the dense kernels go out: to the current stream, as programmatic dependents of what is before them.
// Every such kernel waits (ptx::grid_dependency_wait) before it touches what others write, so that it may
// start, and fetch its weights, while they still run.
#pragma once

#include <cuda_runtime.h>

#include "device/stream.h"

namespace fp4moe {

// Of device 0.
struct DeviceLimits {
  int num_sms = 0;
  int shared_bytes_per_block = 0;  // with opt-in
  int compute_major = 0;
};
const DeviceLimits& device_limits();

struct LaunchShape {
  dim3 grid, block;
  size_t shared_bytes = 0;
  unsigned cluster = 1;  // blocks of a cluster
};

// Gives as much of an SM's memory as can be to shared memory while `kernel` runs, so that the next one's
// blocks, if there is room for both, start beside it: an SM that runs anything keeps its cut of L1 and shared
// memory. Without it a kernel gets about what its own blocks take.
template <class Kernel>
void share_sm(Kernel kernel) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                       cudaSharedmemCarveoutMaxShared);
}

// An error is kept by the stream. A grid of nothing is not launched. Arguments that have a `mark` get one.
template <class Args>
void launch(const char* name, void (*kernel)(Args), const LaunchShape& shape, Args args) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  Stream& stream = current_stream();
  if constexpr (requires { args.mark; }) args.mark = stream.mark(name);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {shape.cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream.handle();
  config.attrs = attributes;
  // What is older waits for what is before it.
  config.numAttrs = device_limits().compute_major < 9 ? 0 : shape.cluster == 1 ? 1 : 2;
  cudaLaunchKernelEx(&config, kernel, args);
  stream.check_launch(name);
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace fp4moe
