#include "base/cpu_info.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "base/cgroup.h"
#include "base/log.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fp4moe {
namespace {

#if defined(__x86_64__)
// __builtin_cpu_supports() knows F16C and AMX only in newer compilers.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

bool has_amx() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kAll) == kAll;
}

// Requests permission from Linux to use the tile registers, for all threads of this process.
bool allow_amx() {
  constexpr int kRequestPermission = 0x1023 /* ARCH_REQ_XCOMP_PERM */, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return true;
  log_warning(std::string("this CPU has AMX, but Linux does not allow it (arch_prctl: ") +
              std::strerror(errno) + "); using AVX-512 instead");
  return false;
}
#endif

Isa detect_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())) return Isa::kScalar;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
                      __builtin_cpu_supports("avx512bf16");
  if (!avx512) return Isa::kAvx2;
  return has_amx() && allow_amx() ? Isa::kAmx : Isa::kAvx512;
#else
  return Isa::kScalar;
#endif
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAmx:
      return "amx";
  }
  return "unknown";
}

Result<Isa> parse_isa(std::string_view name) {
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAmx})
    if (name == isa_name(isa)) return isa;
  return invalid_argument("unknown instruction set '" + std::string(name) +
                          "'; use scalar, avx2, avx512 or amx");
}

Isa best_isa() {
  static const Isa best = [] {
    const Isa detected = detect_isa();
    const char* cap = std::getenv("FP4MOE_ISA");
    if (cap == nullptr) return detected;
    const Result<Isa> parsed = parse_isa(cap);
    if (!parsed.ok()) log_warning("FP4MOE_ISA is ignored: " + parsed.status().message());
    return parsed.ok() ? std::min(detected, *parsed) : detected;
  }();
  return best;
}

bool isa_available(Isa isa) { return isa <= best_isa(); }

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int cores = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set)
                                                           : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  const double quota = std::ceil(cgroup_cores());
  return std::max(1, quota < cores ? static_cast<int>(quota) : cores);
}

std::string cpu_model_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown CPU";
}

int64_t last_level_cache_bytes() {
  int64_t largest = 0;
  for (int index = 0; index < 8; ++index) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size");
    int64_t size = 0;
    char unit = 'B';
    if (!(file >> size >> unit)) continue;
    largest = std::max(largest, unit == 'K' ? size << 10 : unit == 'M' ? size << 20 : size);
  }
  return largest;
}

namespace {

// What the limit leaves of the bytes that /proc/self/status shows under `key`.
int64_t left_of_limit(__rlimit_resource_t resource, const std::string& key) {
  rlimit limit{};
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur > static_cast<rlim_t>(INT64_MAX)) return INT64_MAX;
  std::ifstream file("/proc/self/status");
  int64_t kib = 0;
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(key)) std::istringstream(line.substr(key.size())) >> kib;
  return std::max<int64_t>(0, static_cast<int64_t>(limit.rlim_cur) - kib * 1024);
}

}  // namespace

int64_t available_memory_bytes() {
  int64_t available = static_cast<int64_t>(sysconf(_SC_AVPHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key;
    int64_t kib = 0;
    if (words >> key >> kib && key == "MemAvailable:") available = kib * 1024;
  }
  return std::min({available, cgroup_available_memory(), left_of_limit(RLIMIT_AS, "VmSize:"),
                   left_of_limit(RLIMIT_DATA, "VmData:")});
}

}  // namespace fp4moe
