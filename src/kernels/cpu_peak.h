// Loops that measure a CPU's peak rates of memory reads and of dot products on registers. Implementation:
// kernels/cpu, per ISA.
#pragma once

#include <cstdint>

#include "base/cpu_info.h"

namespace fp4moe {

// Independent chains of one instruction on operands in registers: limited only by the execution units.
struct CpuDot {
  const char* name = nullptr;             // the instruction
  int64_t flops = 0;                      // per round; a multiply and an add count as two
  void (*run)(int64_t rounds) = nullptr;  // on the calling thread
};

struct CpuPeakOps {
  const char* name;  // "cpu_scalar", "cpu_avx2", "cpu_avx512", "cpu_amx"
  CpuDot f32;        // empty for AMX
  CpuDot bf16, int8;
};

// Returns the loops of one ISA level. Precondition: isa_available(isa). Levels without bf16 dot instructions
// report f32 multiply-adds as bf16, since they compute bf16 products that way; the scalar level reports them
// as int8 too.
const CpuPeakOps& cpu_peak_ops(Isa isa);
// Returns AMX tile products (cpu_peak_ops(Isa::kAmx) returns AVX-512's dots), or null without Isa::kAmx.
const CpuPeakOps* amx_peak_ops();
// Reads num_bytes (a multiple of 1024) once; data is 64-byte aligned. Precondition: isa_available(isa).
void cpu_read(Isa isa, const uint8_t* data, int64_t num_bytes);

}  // namespace fp4moe
