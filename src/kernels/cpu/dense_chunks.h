// The interface between the parallel drivers (compiled once) and the kernels that are compiled per ISA: each
// kernel computes one chunk of an op on one thread. A kernel source includes only headers of this folder and
// calls no inline function that another ISA's source could share.
#pragma once

#include "kernels/ops.h"

namespace fp4moe {

struct LinearChunk {
  int64_t row_begin = 0, row_end = 0;      // of x and out
  int64_t panel_begin = 0, panel_end = 0;  // 16 outputs each
};

struct AttentionChunk {
  const int32_t* page_table = nullptr;
  int64_t first_row = 0, first_position = 0;  // of the chunk's first token
  int num_tokens = 0;                         // num_tokens * num_heads <= kAttentionRows
  int first_head = 0, num_heads = 0;          // query heads, all of kv_head
  int kv_head = 0;
};

// Query rows (tokens x heads of one kv head) that share one pass over the keys.
constexpr int kAttentionRows = 32;

struct DenseChunks {
  void (*linear)(const LinearArgs&, const LinearChunk&);
  void (*linear_q8)(const LinearArgs&, const LinearChunk&);  // the weight is LinearLayout::kPanel16Q8
  void (*linear_fp8)(const LinearArgs&, const LinearChunk&);
  void (*rms_norm)(const RmsNormArgs&, int64_t row_begin, int64_t row_end);
  void (*rope)(const RopeArgs&, int64_t row_begin, int64_t row_end);
  void (*attention)(const AttentionArgs&, const AttentionChunk&);
  void (*head_norm)(const HeadNormArgs&, int64_t row_begin, int64_t row_end);
  void (*head_linear)(const HeadLinearArgs&, int64_t head, const LinearChunk&);
  void (*silu_mul)(const SiluMulArgs&, int64_t row, int64_t col_begin, int64_t col_end);
  void (*mul_sigmoid)(const MulSigmoidArgs&, int64_t row_begin, int64_t row_end);
  // All rows of one sequence for one value head; leaves the slot's conv inputs unchanged.
  void (*gated_delta)(const GatedDeltaArgs&, const SequenceRows&, int head);
  void (*exp)(const float* x, int64_t n, float* y);  // vec.h's exp, for its test
};

namespace cpu_scalar {
extern const DenseChunks dense_chunks;
}
namespace cpu_avx2 {
extern const DenseChunks dense_chunks;
}
namespace cpu_avx512 {
extern const DenseChunks dense_chunks;
}
namespace cpu_amx {
extern const DenseChunks dense_chunks;
}

}  // namespace fp4moe
