// What benches of a CPU run besides the ops they time: reads, and dot products of registers. Implementation:
// kernels/cpu, per ISA.
#pragma once

#include <cstdint>

#include "base/cpu_info.h"

namespace fp4moe {

// Independent chains of one instruction on operands in registers: nothing but the execution units limits it.
struct CpuDot {
  const char* name = nullptr;             // the instruction
  int64_t flops = 0;                      // of a round; a multiply and an add are two
  void (*run)(int64_t rounds) = nullptr;  // on the calling thread
};

struct CpuPeakOps {
  const char* name;  // "cpu_scalar", "cpu_avx2", "cpu_avx512", "cpu_amx"
  CpuDot f32;        // empty of AMX
  CpuDot bf16, int8;
};

// Precondition: isa_available(isa). Levels without bf16 dots have f32 multiply-adds there, what such products
// are computed with; the scalar one has them for int8, too.
const CpuPeakOps& cpu_peak_ops(Isa isa);
// AMX tiles; cpu_peak_ops(Isa::kAmx) are AVX-512's dots. Null where Isa::kAmx is not available.
const CpuPeakOps* amx_peak_ops();
// Reads num_bytes (a multiple of 1024) once; data is 64-byte aligned. Precondition: isa_available(isa).
void cpu_read(Isa isa, const uint8_t* data, int64_t num_bytes);

}  // namespace fp4moe
