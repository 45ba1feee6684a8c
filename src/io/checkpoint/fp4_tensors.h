// Loads the tensors of one FP4 matrix in any of the dialects and checks them. Only for the .cc files in this
// folder.
#pragma once

#include <cstdint>
#include <string>

#include "formats/fp4_matrix.h"
#include "io/checkpoint/expert_weights.h"

namespace fp4moe {

// An FP4 matrix and the calibrated scale of its input (decode direction, 1 if the checkpoint has none).
struct Fp4Projection {
  Fp4MatrixView weight;
  float input_scale = 1;
};

// Returns the name of the tensor with module `name`'s codes: "<name>.weight", or "<name>.weight_packed" in
// compressed-tensors.
std::string fp4_codes_name(QuantMethod method, const std::string& name);
// Returns the name of its block scales: "<name>.weight_scale", or "<name>.scale" with kFp8Mxfp4.
std::string fp4_scales_name(QuantMethod method, const std::string& name);
// Whether the checkpoint holds FP4 tensors for the module.
bool has_fp4_tensors(const Checkpoint& checkpoint, QuantMethod method, const std::string& name);

// Returns the error for a checkpoint that has this tensor of an FP4 dialect but declares no quantization.
Status undeclared_fp4(const std::string& tensor);

struct Fp4Shape {
  int64_t rows, cols;        // cols must be a multiple of the block size
  bool reads_scales = true;  // read and check the block scales' bytes
};

// Loads module `name` in the per-module form of `method` (not kNone, not kMxfp4GptOss). Checks names, dtypes,
// shapes, scale bytes and tensor scales.
Result<Fp4Projection> load_fp4_projection(const Checkpoint& checkpoint, QuantMethod method,
                                          const std::string& name, const Fp4Shape& shape);

// kDataLoss, with expert (if the tensor is [E, rows, blocks]), row, block and byte, for a block scale that is
// NaN or negative: e8m0 byte 0xFF, e4m3 bytes from 0x7F on. In a tensor of all experts, checks only the
// `local` ones. The threads of `pool` share the work unless it is null.
Status check_block_scales(Fp4Format format, const TensorEntry& scales, ExpertRange local = {},
                          ThreadPool* pool = nullptr);
// Loads a tensor-wide scale of `dtype` (kF32 or kBF16), which exporters write with shape [] or [1], and
// checks it.
Result<float> load_tensor_scale(const Checkpoint& checkpoint, const std::string& name,
                                DType dtype = DType::kF32);
// kDataLoss, naming the tensor and the value, unless `scale` is finite and positive. `position`: "" or "[3]".
Status check_tensor_scale(const std::string& name, const std::string& position, float scale);

}  // namespace fp4moe
