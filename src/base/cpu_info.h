// What this CPU can do, and how many of it we may use.
#pragma once

#include <string>
#include <string_view>

#include "fp4moe/status.h"

namespace fp4moe {

// Instruction-set levels that kernels are compiled for, each including the ones before.
enum class Isa {
  kScalar,  // x86-64 baseline, and any other CPU
  kAvx2,    // AVX2, FMA, F16C
  kAvx512,  // AVX-512 F, BW, DQ, VL, VBMI, VNNI and BF16: Zen 4, Sapphire Rapids and later
  kAmx,     // AMX tiles with BF16 and INT8, which Linux must allow
};

const char* isa_name(Isa isa);                 // "scalar", "avx2", "avx512", "amx"
Result<Isa> parse_isa(std::string_view name);  // the inverse
// The best level this CPU runs, lowered by the environment variable FP4MOE_ISA if set to a lower one.
Isa best_isa();
// Whether this CPU (and FP4MOE_ISA) allows `isa`.
bool isa_available(Isa isa);

// Cores this process may run on (affinity mask and cgroup quota), at least 1.
int available_cores();
// "AMD EPYC 9B45", from /proc/cpuinfo; "unknown CPU" where it says nothing.
std::string cpu_model_name();
// Of the first core, in bytes: what it shares with others, too; 0 where the system does not say.
int64_t last_level_cache_bytes();
// Memory that can be had without swapping, in bytes (the lower of MemAvailable and the cgroup's rest).
int64_t available_memory_bytes();

}  // namespace fp4moe
