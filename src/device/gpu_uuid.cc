#include "device/gpu_uuid.h"

namespace fp4moe {

std::string gpu_uuid_text(const GpuUuid& uuid) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "GPU-";
  for (size_t i = 0; i < uuid.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += kDigits[uuid[i] >> 4];
    text += kDigits[uuid[i] & 15];
  }
  return text;
}

Status check_own_gpus(std::span<const GpuUuid> uuids) {
  for (size_t second = 1; second < uuids.size(); ++second)
    for (size_t first = 0; first < second; ++first)
      if (uuids[first] == uuids[second])
        return unsupported(
            "ranks " + std::to_string(first) + " and " + std::to_string(second) + " have the same GPU, " +
            gpu_uuid_text(uuids[first]) +
            ", but each process needs its own (--fabric mpi); nearest legal choice: start each process with "
            "CUDA_VISIBLE_DEVICES set to its number on the host, as docs/fabrics.md shows");
  return {};
}

}  // namespace fp4moe
