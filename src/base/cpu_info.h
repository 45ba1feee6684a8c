// Instruction sets, cores, caches and memory of this machine.
#pragma once

#include <string>
#include <string_view>

#include "fp4moe/status.h"

namespace fp4moe {

// Instruction-set levels for which kernels are compiled. Each level includes the previous ones.
enum class Isa {
  kScalar,  // x86-64 baseline, and any other CPU
  kAvx2,    // AVX2, FMA, F16C
  kAvx512,  // AVX-512 F, BW, DQ, VL, VBMI, VNNI and BF16: Zen 4, Sapphire Rapids and later
  kAmx,     // AMX tiles with BF16 and INT8, which Linux must allow
};

const char* isa_name(Isa isa);                 // "scalar", "avx2", "avx512", "amx"
Result<Isa> parse_isa(std::string_view name);  // the inverse of isa_name()
// The best level that this CPU supports, or the level in the environment variable FP4MOE_ISA if that is
// lower.
Isa best_isa();
// Whether `isa` is at most best_isa().
bool isa_available(Isa isa);

// Cores this process may run on (affinity mask and control groups), at least 1.
int available_cores();
// "AMD EPYC 9B45", from /proc/cpuinfo; "unknown CPU" if it is not listed there.
std::string cpu_model_name();
// Bytes of CPU 0's largest cache, which other cores may share; 0 if unknown.
int64_t last_level_cache_bytes();
// Bytes available without swapping: the least of MemAvailable, what the control groups leave (base/cgroup.h)
// and what this process may still map or allocate (ulimit -v, ulimit -d).
int64_t available_memory_bytes();

}  // namespace fp4moe
