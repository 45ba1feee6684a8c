// Which kind of device a model runs on.
#pragma once

#include <cstdint>
#include <string_view>

#include "fp4moe/status.h"

namespace fp4moe {

enum class DeviceKind : uint8_t { kCpu, kCuda };

const char* device_kind_name(DeviceKind kind);  // "cpu", "cuda"

// auto | cpu | cuda. auto is the best device this build can use. kUnsupported for cuda in a build without it,
// kInvalidArgument for any other name.
Result<DeviceKind> resolve_device(std::string_view name);

}  // namespace fp4moe
