// Launches kernels on the current stream as programmatic dependents of the preceding ones. Every such kernel
// waits (ptx::grid_dependency_wait) before it touches data that the preceding kernels write, so that it can
// start, and fetch its weights, while they are still running.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "device/device_context.h"
#include "device/stream.h"

namespace fp4moe {

// Returns the limits and properties of the current GPU.
inline const DeviceInfo& device_limits() { return current_device().info(); }

// Returns whether a kernel may start while earlier kernels are still running. It may not if ranks share a
// GPU: blocks that wait for one rank's kernels could keep those of another rank from starting.
inline bool may_start_early() { return ranks_per_gpu() == 1; }

struct LaunchShape {
  dim3 grid, block;
  size_t shared_bytes = 0;
  unsigned cluster = 1;  // blocks per cluster
};

// Attributes of a kernel, which the driver keeps for each GPU.
struct KernelAttributes {
  int shared_bytes = 0;  // limit of dynamic shared memory; less if static shared memory needs a part
  // Makes shared memory as large as possible on SMs that run the kernel, so that the next kernel's blocks can
  // start beside it if there is room for both: an SM that runs any block keeps its split of L1 and shared
  // memory. By default a kernel gets about what its own blocks need.
  bool shares_sm = false;
  bool has_large_clusters = false;  // of more than 8 blocks
};

// Sets the attributes at the first call for `kernel` on the current GPU. Call it before each launch, always
// with the same attributes. Errors are reported by the next launch.
template <class Args>
void prepare_kernel(void (*kernel)(Args), const KernelAttributes& attributes) {
  const void* const function = reinterpret_cast<const void*>(kernel);
  current_device().prepared_kernels().once(function, [&] {
    if (attributes.shares_sm)
      cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                           cudaSharedmemCarveoutMaxShared);
    if (attributes.has_large_clusters)
      cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    cudaFuncAttributes facts{};
    cudaFuncGetAttributes(&facts, function);
    const int most = device_limits().shared_bytes_per_block - static_cast<int>(facts.sharedSizeBytes);
    cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         std::min(attributes.shared_bytes, most));
  });
}

// Launches the kernel; the stream keeps any error. An empty grid is not launched. If Args has a `mark`, the
// mark is set.
template <class Args>
void launch(const char* name, void (*kernel)(Args), const LaunchShape& shape, Args args) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  Stream& stream = current_stream();
  if constexpr (requires { args.mark; }) args.mark = stream.mark(name);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = may_start_early();
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {shape.cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream.handle();
  config.attrs = attributes;
  // Older GPUs support neither attribute: kernels run one after another.
  config.numAttrs = device_limits().compute_major() < 9 ? 0 : shape.cluster == 1 ? 1 : 2;
  cudaLaunchKernelEx(&config, kernel, args);
  stream.check_launch(name);
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace fp4moe
