// Launches kernels on the current stream as programmatic dependents of the preceding ones. Every such kernel
// waits (ptx::grid_dependency_wait) before it touches data that the preceding kernels write, so that it can
// start, and fetch its weights, while they are still running.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "device/device_context.h"
#include "device/stream.h"

namespace fp4moe {

// Returns the limits and properties of the current GPU.
inline const DeviceInfo& device_limits() { return current_device().info(); }

// Returns whether the current GPU has clusters and programmatic dependents. Older GPUs run kernels one after
// another.
inline bool has_clusters() { return device_limits().compute_major() >= 9; }

// Returns whether a kernel may start while earlier kernels are still running. It may not if ranks share a
// GPU: blocks that wait for one rank's kernels could keep those of another rank from starting.
inline bool may_start_early() { return ranks_per_gpu() == 1; }

struct LaunchShape {
  dim3 grid, block;
  size_t shared_bytes = 0;
  dim3 cluster = 1;             // blocks per cluster
  bool is_cooperative = false;  // all blocks must run at once, or the launch fails
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
  const dim3& cluster = shape.cluster;
  cudaLaunchAttribute attributes[3]{};
  unsigned num_attributes = 0;
  const auto add = [&](cudaLaunchAttributeID id) -> cudaLaunchAttributeValue& {
    attributes[num_attributes].id = id;
    return attributes[num_attributes++].val;
  };
  if (has_clusters())
    add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed =
        may_start_early();
  if (has_clusters() && cluster.x * cluster.y * cluster.z > 1)
    add(cudaLaunchAttributeClusterDimension).clusterDim = {cluster.x, cluster.y, cluster.z};
  if (shape.is_cooperative) add(cudaLaunchAttributeCooperative).cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream.handle();
  config.attrs = attributes;
  config.numAttrs = num_attributes;
  cudaLaunchKernelEx(&config, kernel, args);
  stream.check_launch(name);
}

// Returns how many of the shape's clusters run at once on the current GPU, for a kernel that is prepared;
// 1 or more.
template <class Args>
int max_active_clusters(void (*kernel)(Args), const LaunchShape& shape) {
  const unsigned blocks = shape.cluster.x * shape.cluster.y * shape.cluster.z;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {shape.cluster.x, shape.cluster.y, shape.cluster.z};
  cudaLaunchConfig_t config{};
  config.gridDim = shape.cluster;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  const int most = std::max(device_limits().num_sms / static_cast<int>(blocks), 1);
  int count = 0;
  if (cudaOccupancyMaxActiveClusters(&count, kernel, &config) != cudaSuccess) count = most;
  return std::clamp(count, 1, most);
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns whether copies and loads of 16 bytes can begin at p; null is aligned.
inline bool is_aligned_to_16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace fp4moe
