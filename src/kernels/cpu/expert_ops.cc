#include "kernels/expert_ops.h"

#include <cstring>

#include "base/check.h"
#include "kernels/cpu/expert_panel.h"

namespace fp4moe {

namespace cpu_scalar {
extern const ExpertOps kExpertOps;
}
#if defined(__x86_64__)
namespace cpu_avx2 {
extern const ExpertOps kExpertOps;
}
namespace cpu_avx512 {
extern const ExpertOps kExpertOps;
}
namespace cpu_amx {
extern const ExpertOps kExpertOps;
}
#endif

const ExpertOps& cpu_expert_ops(Isa isa) {
  FP4MOE_CHECK(isa_available(isa), std::string("this CPU does not run ") + isa_name(isa));
#if defined(__x86_64__)
  if (isa == Isa::kAmx) return cpu_amx::kExpertOps;
  if (isa == Isa::kAvx512) return cpu_avx512::kExpertOps;
  if (isa == Isa::kAvx2) return cpu_avx2::kExpertOps;
#endif
  return cpu_scalar::kExpertOps;
}

namespace {

// Returns nibbles 0, 2, 4, 6 of x in the low half and nibbles 1, 3, 5, 7 in the high half.
uint32_t separate_pairs(uint32_t x) {
  const auto gather_low_nibbles = [](uint32_t v) {
    v &= 0x0f0f0f0fu;
    v = (v | v >> 4) & 0x00ff00ffu;
    return (v | v >> 8) & 0xffffu;
  };
  return gather_low_nibbles(x) | gather_low_nibbles(x >> 4) << 16;
}

}  // namespace

void pack_expert_panel(const Fp4MatrixView& w, int64_t panel, uint8_t* dst) {
  const int64_t num_blocks = w.cols / fp4_block(w.format);
  const int64_t scale_bytes = expert_panel_scale_bytes(w.format, w.cols);
  std::memset(dst, 0, static_cast<size_t>(scale_bytes));
  for (int64_t r = 0; r < kPanelRows; ++r) {
    const int64_t row = panel * kPanelRows + r;
    const uint8_t* scales = w.scales + row * w.scale_stride_bytes;
    for (int64_t b = 0; b < num_blocks; ++b) dst[b * kPanelRows + r] = scales[b];
    const uint8_t* codes = w.codes + row * w.code_stride_bytes;
    for (int64_t j = 0; j < w.cols / 8; ++j) {
      uint32_t word;
      std::memcpy(&word, codes + 4 * j, 4);
      word = separate_pairs(word);
      std::memcpy(dst + scale_bytes + (j * kPanelRows + r) * 4, &word, 4);
    }
  }
}

}  // namespace fp4moe
