// The kind of device that a model runs on.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "fp4moe/status.h"

namespace fp4moe {

enum class DeviceKind : uint8_t { kCpu, kCuda };

const char* device_kind_name(DeviceKind kind);  // "cpu", "cuda"

struct DeviceChoice {
  DeviceKind kind = DeviceKind::kCpu;
  int compute_capability = 0;  // GPU: 10 major + minor; CPU: 0
};
std::string compute_capability_text(int compute_capability);  // "9.0" for 90

// Returns the ordinal of a rank's GPU. The ranks of a process are assigned to GPUs in order, ranks_per_gpu()
// of them to each GPU.
int gpu_of_rank(int rank);

// Returns the device called `name`: auto | cpu | cuda; auto is GPU `ordinal` if this build can use it,
// otherwise the CPU. kUnsupported, with the reason, for cuda if the GPU is not usable; kInvalidArgument for
// any other name.
Result<DeviceChoice> resolve_device(std::string_view name, int ordinal);

}  // namespace fp4moe
