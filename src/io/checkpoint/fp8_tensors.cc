#include "io/checkpoint/fp8_tensors.h"

#include <cmath>
#include <limits>

#include "base/check.h"
#include "formats/bf16.h"
#include "formats/e8m0.h"

namespace fp4moe {
namespace {

using Dims = std::vector<int64_t>;

constexpr int64_t blocks_of(int64_t size) { return (size + kFp8WeightBlock - 1) / kFp8WeightBlock; }

std::string dims_string(const Dims& dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

// Returns a view with the block sizes that the scales' shape implies.
Result<Fp8LinearView> blocks_of_shape(const TensorEntry& scales, int64_t n, int64_t k) {
  const Dims& shape = scales.view.shape;
  const Dims blocks = {blocks_of(n), blocks_of(k)};
  if (shape.empty() || shape == Dims{1} || shape == Dims{1, 1})
    return Fp8LinearView{.row_block = n, .col_block = k};
  if (shape == Dims{n} || shape == Dims{n, 1}) return Fp8LinearView{.row_block = 1, .col_block = k};
  if (shape == blocks) return Fp8LinearView{.row_block = kFp8WeightBlock, .col_block = kFp8WeightBlock};
  return invalid_argument("tensor '" + scales.name + "' has shape " + dims_string(shape) +
                          "; legal for an FP8 matrix " + dims_string({n, k}) + ": [], [1], " +
                          dims_string({n}) + ", " + dims_string({n, 1}) + " or " + dims_string(blocks));
}

Result<std::vector<float>> read_scales(const TensorEntry& scales) {
  const TensorView& view = scales.view;
  if (view.dtype != DType::kF32 && view.dtype != DType::kBF16 && view.dtype != DType::kF8E8M0)
    return invalid_argument("tensor '" + scales.name + "' is " + dtype_name(view.dtype) +
                            "; legal for the scales of an FP8 matrix: F32, BF16 and F8_E8M0");
  std::vector<float> values;
  for (int64_t i = 0; i < view.num_elems(); ++i) {
    float value = view.dtype == DType::kF32    ? view.as<float>()[i]
                  : view.dtype == DType::kBF16 ? bf16_to_float(view.as<bf16>()[i])
                                               : e8m0_decode(view.data[i]);
    if (!std::isfinite(value) || value < 0)
      return data_loss("tensor '" + scales.name + "' is " + std::to_string(value) + " at element " +
                       std::to_string(i) + "; legal: finite numbers from 0 on");
    if (value < std::numeric_limits<float>::min()) value = 0;
    values.push_back(value);
  }
  return values;
}

}  // namespace

const TensorEntry* find_fp8_scales(const Checkpoint& checkpoint, const std::string& name) {
  const TensorEntry* codes = checkpoint.find(name + ".weight");
  if (codes == nullptr || codes->view.dtype != DType::kF8E4M3) return nullptr;
  for (const char* suffix : {".weight_scale_inv", ".weight_scale", ".scale"})
    if (const TensorEntry* scales = checkpoint.find(name + suffix); scales != nullptr) return scales;
  return nullptr;
}

Result<Fp8Matrix> load_fp8_matrix(const Checkpoint& checkpoint, const std::string& name, int64_t n,
                                  int64_t k) {
  const bool is_conv = checkpoint.find(name + ".weight")->view.shape.size() == 3;
  FP4MOE_ASSIGN_OR_RETURN(const TensorView codes, checkpoint.get(name + ".weight", DType::kF8E4M3,
                                                                 is_conv ? Dims{n, 1, k} : Dims{n, k}));
  const TensorEntry& scales = *find_fp8_scales(checkpoint, name);
  Fp8Matrix matrix;
  FP4MOE_ASSIGN_OR_RETURN(matrix.view, blocks_of_shape(scales, n, k));
  FP4MOE_ASSIGN_OR_RETURN(std::vector<float> values, read_scales(scales));
  matrix.scales = std::make_shared<const std::vector<float>>(std::move(values));
  matrix.view.codes = codes.data;
  matrix.view.scales = matrix.scales->data();
  return matrix;
}

}  // namespace fp4moe
