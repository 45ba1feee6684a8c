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

// The ordinal of the GPU of a rank: the ranks of a process have one GPU each, in order (ranks_per_gpu()).
int gpu_of_rank(int rank);

// name: auto | cpu | cuda; auto is GPU `ordinal` if this build can use it, else the CPU. kUnsupported for
// cuda if the GPU is not usable, with the reason; kInvalidArgument for any other name.
Result<DeviceChoice> resolve_device(std::string_view name, int ordinal);

}  // namespace fp4moe
