#include "device/device.h"

#include <string>

#include "device/cuda_probe.h"

namespace fp4moe {

const char* device_kind_name(DeviceKind kind) { return kind == DeviceKind::kCpu ? "cpu" : "cuda"; }

Result<DeviceKind> resolve_device(std::string_view name) {
  if (name == "auto" || name == "cpu") return DeviceKind::kCpu;
  if (name == "cuda")
    return unsupported("device=cuda: this version has no CUDA kernels (" + describe_cuda() +
                       "); nearest legal choice: --device cpu");
  return invalid_argument("unknown device '" + std::string(name) + "': auto, cpu or cuda");
}

}  // namespace fp4moe
