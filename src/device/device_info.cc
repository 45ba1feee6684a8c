#include "device/device_info.h"

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "base/check.h"
#include "device/device.h"

#ifdef FP4MOE_HAS_CUDA
#include "device/cuda_error.h"
#endif

namespace fp4moe {

std::string cuda_version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

int ranks_per_gpu() {
  static const int ranks = [] {
    const char* const text = std::getenv("FP4MOE_RANKS_PER_GPU");
    if (text == nullptr || *text == '\0') return 1;
    int value = 0;
    const char* const end = text + std::strlen(text);
    const auto [rest, error] = std::from_chars(text, end, value);
    FP4MOE_CHECK(error == std::errc() && rest == end && value >= 1 && value <= 16,
                 "FP4MOE_RANKS_PER_GPU='" + std::string(text) + "'; legal: 1 to 16");
    // Loading a kernel on its first use would wait for another rank's kernels, which may be waiting for that
    // kernel. Streams that share a hardware queue would wait for each other in the same way.
    if (value > 1) {
      setenv("CUDA_MODULE_LOADING", "EAGER", 0);
      setenv("CUDA_DEVICE_MAX_CONNECTIONS", std::to_string(kHardwareQueues).c_str(), 0);
    }
    return value;
  }();
  return ranks;
}

Status check_device(const DeviceFacts& facts) {
  if (facts.driver_version == 0)
    return unsupported("no NVIDIA driver on this machine (libcuda.so.1 was not found)");
  if (facts.driver_too_old)
    return unsupported("the NVIDIA driver supports CUDA " + cuda_version_text(facts.driver_version) +
                       ", but this build was made with CUDA " + cuda_version_text(facts.runtime_version) +
                       ": update the driver, or build with an older toolkit (12.4 or newer)");
  if (!facts.error.empty()) return unsupported("no usable CUDA device: " + facts.error);
  if (facts.num_devices == 0)
    return unsupported("the NVIDIA driver reports no device (is CUDA_VISIBLE_DEVICES set?)");
  if (facts.ordinal < 0 || facts.ordinal >= facts.num_devices)
    return unsupported("no GPU " + std::to_string(facts.ordinal) + ": the NVIDIA driver reports " +
                       std::to_string(facts.num_devices) + "; legal ordinals: 0 to " +
                       std::to_string(facts.num_devices - 1));
  const DeviceInfo& device = facts.device;
  if (device.compute_capability < 80)
    return unsupported(device.name + " has compute capability " +
                       compute_capability_text(device.compute_capability) +
                       ", but only 8.0 (Ampere) or newer is supported");
  return {};
}

#ifdef FP4MOE_HAS_CUDA

namespace {

DeviceFacts read_facts(int ordinal) {
  DeviceFacts facts;
  facts.ordinal = ordinal;
  cudaDriverGetVersion(&facts.driver_version);
  cudaRuntimeGetVersion(&facts.runtime_version);
  const cudaError_t error = cudaGetDeviceCount(&facts.num_devices);
  if (error != cudaSuccess) {
    cudaGetLastError();
    facts.num_devices = 0;
    facts.driver_too_old = error == cudaErrorInsufficientDriver;
    if (error != cudaErrorNoDevice) facts.error = cudaGetErrorString(error);
    return facts;
  }
  if (ordinal < 0 || ordinal >= facts.num_devices) return facts;
  cudaDeviceProp properties{};
  if (const cudaError_t e = cudaGetDeviceProperties(&properties, ordinal); e != cudaSuccess) {
    cudaGetLastError();
    facts.error = cudaGetErrorString(e);
    return facts;
  }
  facts.device = {.name = properties.name,
                  .compute_capability = 10 * properties.major + properties.minor,
                  .num_sms = properties.multiProcessorCount / ranks_per_gpu(),
                  .shared_bytes_per_block = static_cast<int>(properties.sharedMemPerBlockOptin),
                  .l2_bytes = properties.l2CacheSize,
                  .memory_bytes = static_cast<int64_t>(properties.totalGlobalMem),
                  .driver_version = facts.driver_version,
                  .runtime_version = facts.runtime_version};
  static_assert(sizeof properties.uuid.bytes == sizeof facts.device.uuid);
  std::memcpy(facts.device.uuid.data(), properties.uuid.bytes, sizeof properties.uuid.bytes);
  return facts;
}

}  // namespace

Result<DeviceInfo> device_info(int ordinal) {
  ranks_per_gpu();  // called before the driver reads the environment
  const DeviceFacts facts = read_facts(ordinal);
  if (Status usable = check_device(facts); !usable.ok()) return usable;
  return facts.device;
}

#else

Result<DeviceInfo> device_info(int) { return unsupported("built without CUDA"); }

#endif

}  // namespace fp4moe
