#include <string>

#include "base/check.h"
#include "kernels/cpu/peak_chunk.h"

namespace fp4moe {

namespace cpu_scalar {
extern const PeakChunks kPeakChunks;
}
#if defined(__x86_64__)
namespace cpu_avx2 {
extern const PeakChunks kPeakChunks;
}
namespace cpu_avx512 {
extern const PeakChunks kPeakChunks;
}
#endif

namespace {

const PeakChunks& chunks_of(Isa isa) {
  FP4MOE_CHECK(isa_available(isa), std::string("this CPU does not run ") + isa_name(isa));
#if defined(__x86_64__)
  if (isa >= Isa::kAvx512) return cpu_avx512::kPeakChunks;
  if (isa == Isa::kAvx2) return cpu_avx2::kPeakChunks;
#endif
  return cpu_scalar::kPeakChunks;
}

}  // namespace

const CpuPeakOps& cpu_peak_ops(Isa isa) { return chunks_of(isa).ops; }

void cpu_read(Isa isa, const uint8_t* data, int64_t num_bytes) { chunks_of(isa).read(data, num_bytes); }

}  // namespace fp4moe
