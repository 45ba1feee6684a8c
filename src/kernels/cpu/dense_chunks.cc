#include "kernels/cpu/dense_chunks.h"

#include "kernels/cpu/vec.h"

namespace fp4moe::FP4MOE_ISA {

void linear_chunk(const LinearArgs&, const LinearChunk&);
void linear_q8_chunk(const LinearArgs&, const LinearChunk&);
void linear_fp8_chunk(const LinearArgs&, const LinearChunk&);
void rms_norm_chunk(const RmsNormArgs&, int64_t row_begin, int64_t row_end);
void rope_chunk(const RopeArgs&, int64_t row_begin, int64_t row_end);
void attention_chunk(const AttentionArgs&, const AttentionChunk&);
void head_norm_chunk(const HeadNormArgs&, int64_t row_begin, int64_t row_end);
void head_linear_chunk(const HeadLinearArgs&, int64_t head, const LinearChunk&);
void silu_mul_chunk(const SiluMulArgs&, int64_t row, int64_t col_begin, int64_t col_end);
void mul_sigmoid_chunk(const MulSigmoidArgs&, int64_t row_begin, int64_t row_end);
void gated_delta_chunk(const GatedDeltaArgs&, const SequenceRows&, int head);

namespace {

void exp_elems(const float* x, int64_t n, float* y) {
  for (int64_t i = 0; i < n; i += kLanes) store_partial(y + i, exp(load_partial(x + i, n - i)), n - i);
}

}  // namespace

extern const DenseChunks dense_chunks = {linear_chunk,      linear_q8_chunk,   linear_fp8_chunk,
                                         rms_norm_chunk,    rope_chunk,        attention_chunk,
                                         head_norm_chunk,   head_linear_chunk, silu_mul_chunk,
                                         mul_sigmoid_chunk, gated_delta_chunk, exp_elems};

}  // namespace fp4moe::FP4MOE_ISA
