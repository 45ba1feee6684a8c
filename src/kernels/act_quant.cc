#include "kernels/act_quant.h"

#include <vector>

#include "base/cpu_info.h"
#include "formats/e4m3.h"
#include "formats/fp8.h"
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

// Quantises row t to FP8. Used only by the oracle (a GPU has its own kernel), so one implementation serves
// every ISA.
void fp8_row(const ActQuantArgs& a, int64_t t) {
  std::vector<uint8_t> codes(static_cast<size_t>(a.x.cols));
  a.row_scales[t] =
      a.x.dtype == DType::kF32
          ? fp8_quantize_token(static_cast<const float*>(row_of(a.x, t)), a.x.cols, codes.data())
          : fp8_quantize_token(static_cast<const bf16*>(row_of(a.x, t)), a.x.cols, codes.data());
  for (int64_t i = 0; i < a.x.cols; ++i) {
    const float value = e4m3_decode(codes[static_cast<size_t>(i)]);
    if (a.out.dtype == DType::kF32)
      static_cast<float*>(a.out.data)[t * a.out.cols + i] = value;
    else
      static_cast<bf16*>(a.out.data)[t * a.out.cols + i] = float_to_bf16(value);
  }
}

}  // namespace

void quantize_act(const ActQuantArgs& a) {
  static const ActQuantChunk& chunk = best_chunk();
  for (int64_t t = 0; t < a.x.rows; ++t) {
    if (a.kind == ActQuantKind::kInt8Block) {
      chunk.int8_row(a, t);
      continue;
    }
    if (a.kind == ActQuantKind::kFp8PerToken) {
      fp8_row(a, t);
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
