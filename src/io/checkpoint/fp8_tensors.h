// Loads FP8 matrices: F8_E4M3 codes with scales in any of the dialects. Only for the .cc files in this
// folder.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "formats/fp8_matrix.h"
#include "io/checkpoint/checkpoint.h"

namespace fp4moe {

// Returns the scale tensor of module `name`'s FP8 codes: "<name>.weight_scale_inv" (DeepSeek),
// "<name>.weight_scale" or "<name>.scale". Null unless "<name>.weight" is F8_E4M3 and has one.
const TensorEntry* find_fp8_scales(const Checkpoint& checkpoint, const std::string& name);

struct Fp8Matrix {
  Fp8LinearView view;
  std::shared_ptr<const std::vector<float>> scales;  // of `view`
};

// Loads module `name`, [n, k] (a convolution over time: [n, 1, k]), for which find_fp8_scales() found scales:
// F32, BF16 or F8_E8M0; one for the matrix ([], [1] or [1, 1]), one for each row ([n] or [n, 1]), or one for
// each block of 128 x 128 ([ceil(n / 128), ceil(k / 128)]). All multiply. Scales below 2^-126 become 0.
// kInvalidArgument: other shapes; kDataLoss: a scale that is NaN, infinite or negative. Does not read the
// codes.
Result<Fp8Matrix> load_fp8_matrix(const Checkpoint& checkpoint, const std::string& name, int64_t n,
                                  int64_t k);

}  // namespace fp4moe
