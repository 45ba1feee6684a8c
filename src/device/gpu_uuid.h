// The identity of a GPU, by which processes, also on different machines, notice that they share one.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "fp4moe/status.h"

namespace fp4moe {

using GpuUuid = std::array<uint8_t, 16>;

// Returns the UUID as nvidia-smi prints it: "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f".
std::string gpu_uuid_text(const GpuUuid& uuid);
// Returns kUnsupported if two ranks, each in a process of its own, have the same GPU. uuids: [ranks]. A pure
// function.
Status check_own_gpus(std::span<const GpuUuid> uuids);

}  // namespace fp4moe
