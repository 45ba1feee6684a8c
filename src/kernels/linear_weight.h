// How the weights of DenseOps::linear are stored: formats, memory layouts and packing.
#pragma once

#include <cstdint>
#include <functional>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "formats/bf16.h"
#include "formats/fp8_matrix.h"

namespace fp4moe {

// How a checkpoint's bf16 dense weights are stored: bf16, the 8-bit blocks of formats/q8.h, or FP8 with one
// scale per row.
enum class DenseQuant : uint8_t { kNone, kQ8, kFp8 };

// The format of one linear op's weight. A checkpoint's FP8 weights stay as they are.
enum class LinearFormat : uint8_t { kBf16, kQ8, kFp8 };

// Memory layout of a dense [N, K] weight.
enum class LinearLayout : uint8_t {
  kRowMajor,     // [N, K], as in the checkpoint; kernels/ref
  kPanel16,      // [ceil(N/16)][ceil(K/2)][16][2]: 16 output rows side by side, pairs of k together (the
                 // operand order of vdpbf16ps); rows past N and the column past an odd K are zero
  kRowMajorQ8,   // [N][ceil(K/32)] Q8Block; kernels/ref
  kPanel16Q8,    // [ceil(N/16)] panels of kernels/cpu/q8_panel.h; rows past N and columns past K are zero
  kRowMajorFp8,  // codes and scales as in Fp8LinearView; kernels/ref
  kWordsFp8,     // the same, with each 16 columns' codes as four words of fp8_word.h; GPUs
  kPanel16Fp8,   // codes: [ceil(N/16)] panels as kPanel16Q8's, without scales; scales: [ceil(N/16)][ceil(K /
                 // col_block)][16]; rows past N and columns past K are zero
};

constexpr LinearFormat linear_format(LinearLayout layout) {
  switch (layout) {
    case LinearLayout::kRowMajorQ8:
    case LinearLayout::kPanel16Q8:
      return LinearFormat::kQ8;
    case LinearLayout::kRowMajorFp8:
    case LinearLayout::kWordsFp8:
    case LinearLayout::kPanel16Fp8:
      return LinearFormat::kFp8;
    default:
      return LinearFormat::kBf16;
  }
}

// Returns the size in bytes of an [N, K] weight in `layout`, which is no FP8 layout.
int64_t linear_weight_bytes(int64_t n, int64_t k, LinearLayout layout);
// Packs src [N, K], row-major, into dst, which is linear_weight_bytes() long, 64-byte aligned and does not
// overlap src. Exact for bf16 layouts; blocks of 8-bit layouts begin at column 0.
void pack_linear_weight(const bf16* src, int64_t n, int64_t k, LinearLayout layout, void* dst,
                        ThreadPool& pool);

struct DenseOps;
// Returns a row-major [N, K] weight; if the call created the weight, `storage` owns its memory.
using LinearSource = std::function<Result<const bf16*>(Buffer& storage)>;
// Returns the weight in the memory and layout of `ops`; on a host, it may be loaded from a WeightStore
// without a call to `source`.
Result<Buffer> put_linear_weight(const LinearSource& source, int64_t n, int64_t k, const DenseOps& ops,
                                 ThreadPool& pool);

struct Fp8Shape {
  int64_t n = 0, k = 0;
  int64_t row_block = 0, col_block = 0;  // as in Fp8LinearView
};
// An FP8 weight in the memory and layout of a table of ops: scales, then codes, which start at a multiple of
// 256 bytes.
struct Fp8Weight {
  Buffer storage;
  Fp8LinearView view;  // of `storage`
};
// Returns the size in bytes of a weight's codes and scales in `layout`, which is an FP8 layout.
int64_t fp8_weight_bytes(const Fp8Shape& shape, LinearLayout layout);
// Returns a row-major weight; if the call created it, `storage` owns its memory.
using Fp8Source = std::function<Result<Fp8LinearView>(Buffer& storage)>;
// The same as put_linear_weight() for an FP8 weight, in ops.fp8_layout.
// kUnsupported if shape.k is not a multiple of ops.fp8_column_step.
Result<Fp8Weight> put_fp8_weight(const Fp8Source& source, const Fp8Shape& shape, const DenseOps& ops,
                                 ThreadPool& pool);
// The shape of an [N, K] bf16 weight that is quantised to FP8.
constexpr Fp8Shape quantized_fp8_shape(int64_t n, int64_t k) { return {n, k, 1, k}; }
// Quantises a bf16 weight (fp8_quantize_token() of each row), and puts it like put_fp8_weight().
Result<Fp8Weight> put_quantized_fp8_weight(const LinearSource& source, int64_t n, int64_t k,
                                           const DenseOps& ops, ThreadPool& pool);

}  // namespace fp4moe
