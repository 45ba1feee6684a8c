#include "device/absent_gpu.h"

#include <charconv>

namespace fp4moe {
namespace {

// Memory as nvidia-smi reports it for an idle GPU, in MiB.
constexpr struct {
  const char* name;
  int compute_capability;
  int64_t memory_mib;
} kGpus[] = {
    {"h100", 90, 81'559},
    {"h200", 90, 143'771},
    {"gh200", 90, 97'871},
};

// Returns 90 for "sm_90", and 0 if `name` does not have this form.
int parse_sm(std::string_view name) {
  if (!name.starts_with("sm_")) return 0;
  int value = 0;
  const auto [rest, error] = std::from_chars(name.data() + 3, name.data() + name.size(), value);
  return error == std::errc() && rest == name.data() + name.size() ? value : 0;
}

}  // namespace

std::string absent_gpu_names() {
  std::string names;
  for (const auto& gpu : kGpus) names += (names.empty() ? "" : ", ") + std::string(gpu.name);
  return names;
}

Result<AbsentGpu> absent_gpu(std::string_view name, double memory_gib) {
  constexpr double kMostGib = 4096;
  if (memory_gib != 0 && !(memory_gib > 0 && memory_gib <= kMostGib))  // also true for NaN
    return invalid_argument("--gpu-memory " + std::to_string(memory_gib) +
                            "; legal: above 0, at most 4096 GiB");
  AbsentGpu found{.compute_capability = parse_sm(name)};
  for (const auto& gpu : kGpus)
    if (name == gpu.name) found = {gpu.compute_capability, gpu.memory_mib << 20};
  if (found.compute_capability / 10 != 9)  // attention and dense layers are compiled for Hopper
    return invalid_argument("--gpu " + std::string(name) + "; legal: " + absent_gpu_names() +
                            ", or sm_90 with --gpu-memory");
  if (memory_gib > 0) found.memory_bytes = static_cast<int64_t>(memory_gib * double{1 << 30});
  if (found.memory_bytes == 0)
    return invalid_argument("--gpu " + std::string(name) + " needs --gpu-memory, in GiB");
  return found;
}

Result<DeviceChoice> choose_device(std::string_view device, const std::optional<AbsentGpu>& gpu) {
  if (!gpu) return resolve_device(device, gpu_of_rank(0));
  if (device == "cpu") return invalid_argument("--device cpu contradicts --gpu");
  return DeviceChoice{DeviceKind::kCuda, gpu->compute_capability};
}

}  // namespace fp4moe
