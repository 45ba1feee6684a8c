#include "device/cuda_probe.h"

#include <cstdio>

#include "device/device_info.h"

namespace fp4moe {

std::string describe_cuda(int ordinal) {
  const auto info = device_info(ordinal);
  if (!info.ok()) return info.status().message();
  char line[400];
  std::snprintf(line, sizeof line, "%s, sm_%d, %d SMs, %.1f GiB, driver for CUDA %s, built with %s",
                info->name.c_str(), info->compute_capability, info->num_sms,
                static_cast<double>(info->memory_bytes) / (1024.0 * 1024 * 1024),
                cuda_version_text(info->driver_version).c_str(),
                cuda_version_text(info->runtime_version).c_str());
  return line;
}

}  // namespace fp4moe
