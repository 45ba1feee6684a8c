// GPUs that plans are made for on machines without them.
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

// "h100, h200, ...".
std::string absent_gpu_names();

// name: one of absent_gpu_names(), or sm_90 for any GPU of compute capability 9.0. memory_gib replaces the
// memory of a GPU with a name, and is required with sm_*; 0: not given. kInvalidArgument for an unknown name,
// a GPU other than Hopper, and a size outside (0, 4096].
Result<AbsentGpu> absent_gpu(std::string_view name, double memory_gib);

// The device named `device` (resolve_device(), for rank 0), or the absent GPU. kInvalidArgument for cpu with
// a GPU.
Result<DeviceChoice> choose_device(std::string_view device, const std::optional<AbsentGpu>& gpu);

}  // namespace fp4moe
