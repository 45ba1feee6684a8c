#include "kernels/act_quant.h"

#include "base/cpu_info.h"
#include "formats/nvfp4.h"
#include "kernels/cpu/act_quant_chunk.h"

namespace fp4moe {
namespace {

const ActQuantChunk& best_chunk() {
#if defined(__x86_64__)
  if (isa_available(Isa::kAvx512)) return cpu_avx512::act_quant_chunk;
  if (isa_available(Isa::kAvx2)) return cpu_avx2::act_quant_chunk;
#endif
  return cpu_scalar::act_quant_chunk;
}

const void* row_of(const ActRows& rows, int64_t t) {
  return static_cast<const uint8_t*>(rows.data) + t * rows.cols * (rows.dtype == DType::kF32 ? 4 : 2);
}

}  // namespace

void quantize_act(const ActQuantArgs& a) {
  static const ActQuantChunk& chunk = best_chunk();
  for (int64_t t = 0; t < a.x.rows; ++t) {
    if (a.kind == ActQuantKind::kInt8Block) {
      chunk.int8_row(a, t);
      continue;
    }
    EncodeScale scale = a.scale;
    if (a.kind == ActQuantKind::kNvfp4PerToken) {
      const float amax = chunk.amax(row_of(a.x, t), a.x.dtype, a.x.cols);
      scale = nvfp4_encode_scale(amax);
      a.row_scales[t] = amax == 0 ? 0 : to_decode(scale).value;
    }
    chunk.nvfp4_row(a, t, scale.value, to_decode(scale).value);
  }
}

}  // namespace fp4moe
