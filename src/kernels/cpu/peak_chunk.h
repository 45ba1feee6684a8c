// The peak loops of one ISA, for kernels/cpu/peak_ops.cc.
#pragma once

#include "kernels/cpu_peak.h"

namespace fp4moe {

struct PeakChunks {
  CpuPeakOps ops;
  void (*read)(const uint8_t* data, int64_t num_bytes);
};

}  // namespace fp4moe
