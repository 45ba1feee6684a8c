// GPUs for which plans can be made on machines that do not have them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "device/device.h"
#include "fp4moe/status.h"

namespace fp4moe {

struct AbsentGpu {
  int compute_capability = 0;  // 10 major + minor
  int64_t memory_bytes = 0;    // free for the engine
};

// Returns "h100, h200, ...".
std::string absent_gpu_names();

// Returns the GPU called `name`: one of absent_gpu_names(), or sm_90 for any GPU of compute capability 9.0.
// memory_gib replaces the memory of a GPU from the list, and is required with sm_90; 0: not given.
// kInvalidArgument for an unknown name, a GPU other than Hopper, or a size outside (0, 4096].
Result<AbsentGpu> absent_gpu(std::string_view name, double memory_gib);

// Returns the absent GPU if there is one, otherwise the device named `device` (resolve_device(), for rank 0).
// kInvalidArgument for cpu together with an absent GPU.
Result<DeviceChoice> choose_device(std::string_view device, const std::optional<AbsentGpu>& gpu);

}  // namespace fp4moe
