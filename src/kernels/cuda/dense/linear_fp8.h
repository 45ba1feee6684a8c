// Dense linear layers with FP8 weights on tensor cores, for any number of tokens.
#pragma once

#include "kernels/ops.h"

namespace fp4moe {

// K of an FP8 weight on a GPU is a multiple of this.
inline constexpr int64_t kFp8DeviceStep = 16;

enum class Fp8Splits : uint8_t {
  kBySize,  // K is split if there are few outputs
  kNone     // a token's bits depend neither on T nor on N
};

// DenseOps::linear with LinearFormat::kFp8 in LinearLayout::kRowMajorFp8. args.fp8.col_block is at least K or
// a multiple of kFp8ColumnStep.
void linear_fp8(const LinearArgs& args, Fp8Splits splits);

}  // namespace fp4moe
