#include "device/device.h"

#include "device/device_info.h"

namespace fp4moe {

const char* device_kind_name(DeviceKind kind) { return kind == DeviceKind::kCpu ? "cpu" : "cuda"; }

std::string compute_capability_text(int compute_capability) {
  return std::to_string(compute_capability / 10) + "." + std::to_string(compute_capability % 10);
}

int gpu_of_rank(int rank) { return rank / ranks_per_gpu(); }

Result<DeviceChoice> resolve_device(std::string_view name, int ordinal) {
  if (name == "cpu") return DeviceChoice{};
  if (name != "auto" && name != "cuda")
    return invalid_argument("unknown device '" + std::string(name) + "'; legal: auto, cpu, cuda");
  const Result<DeviceInfo> info = device_info(ordinal);
  if (info.ok()) return DeviceChoice{DeviceKind::kCuda, info->compute_capability};
  if (name == "auto") return DeviceChoice{};
  return unsupported("device=cuda: " + info.status().message() + "; nearest legal choice: --device cpu");
}

}  // namespace fp4moe
