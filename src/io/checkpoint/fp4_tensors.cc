#include "io/checkpoint/fp4_tensors.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "base/check.h"
#include "base/run_ranges.h"
#include "formats/bf16.h"
#include "formats/tensor_scale.h"

namespace fp4moe {
namespace {

// Returns the index of the first invalid scale byte, or -1. Valid: e8m0 bytes other than 0xFF (NaN), and e4m3
// bytes other than 0x7F (NaN) whose sign bit is clear.
int64_t find_bad_scale(Fp4Format format, const uint8_t* bytes, int64_t num_bytes) {
  if (format == Fp4Format::kMxfp4) {
    const void* at = std::memchr(bytes, 0xFF, static_cast<size_t>(num_bytes));
    return at == nullptr ? -1 : static_cast<const uint8_t*>(at) - bytes;
  }
  constexpr int64_t kChunk = 4096;  // the inner loop has no exit, so that it is vectorised
  for (int64_t begin = 0; begin < num_bytes; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, num_bytes);
    uint8_t worst = 0;
    for (int64_t i = begin; i < end; ++i) worst = std::max(worst, bytes[i]);
    if (worst < 0x7F) continue;
    for (int64_t i = begin; i < end; ++i)
      if (bytes[i] >= 0x7F) return i;
  }
  return -1;
}

// The same for many bytes.
int64_t find_bad_scale(Fp4Format format, const uint8_t* bytes, int64_t num_bytes, ThreadPool* pool) {
  constexpr int64_t kChunk = int64_t{1} << 18;
  return find_lowest(pool, num_bytes, kChunk, [&](int64_t begin, int64_t end) {
    const int64_t found = find_bad_scale(format, bytes + begin, end - begin);
    return found < 0 ? found : begin + found;
  });
}

// Returns the dtype of the tensor if it is `first` or `second`, which have the same bytes; else `first`.
DType one_of(const Checkpoint& checkpoint, const std::string& name, DType first, DType second) {
  const TensorEntry* entry = checkpoint.find(name);
  return entry != nullptr && entry->view.dtype == second ? second : first;
}

// compressed-tensors stores the encode-direction scale (a divisor).
Result<float> load_divisor(const Checkpoint& checkpoint, const std::string& name) {
  FP4MOE_ASSIGN_OR_RETURN(const float divisor, load_tensor_scale(checkpoint, name));
  const float scale = to_decode(EncodeScale{divisor}).value;
  if (std::isfinite(scale)) return scale;
  return data_loss("tensor '" + name + "' is " + std::to_string(divisor) +
                   "; legal: numbers above 0 with a finite reciprocal");
}

Status load_modelopt_scales(const Checkpoint& checkpoint, const std::string& name, Fp4Projection& p) {
  const std::string input_name = name + ".input_scale";
  FP4MOE_ASSIGN_OR_RETURN(p.weight.tensor_scale, load_tensor_scale(checkpoint, name + ".weight_scale_2"));
  if (checkpoint.find(input_name) == nullptr) return {};  // weight-only exports have none
  FP4MOE_ASSIGN_OR_RETURN(p.input_scale, load_tensor_scale(checkpoint, input_name));
  return {};
}

Status load_compressed_scales(const Checkpoint& checkpoint, const std::string& name, Fp4Projection& p) {
  const std::string input_name = name + ".input_global_scale";
  FP4MOE_ASSIGN_OR_RETURN(p.weight.tensor_scale, load_divisor(checkpoint, name + ".weight_global_scale"));
  if (checkpoint.find(input_name) == nullptr) return {};
  FP4MOE_ASSIGN_OR_RETURN(p.input_scale, load_divisor(checkpoint, input_name));
  return {};
}

}  // namespace

Result<float> load_tensor_scale(const Checkpoint& checkpoint, const std::string& name, DType dtype) {
  const TensorEntry* entry = checkpoint.find(name);
  const bool one_element = entry != nullptr && entry->view.shape == std::vector<int64_t>{1};
  FP4MOE_ASSIGN_OR_RETURN(
      const TensorView view,
      checkpoint.get(name, dtype, one_element ? std::vector<int64_t>{1} : std::vector<int64_t>{}));
  const float scale = dtype == DType::kBF16 ? bf16_to_float(*view.as<bf16>()) : *view.as<float>();
  FP4MOE_RETURN_IF_ERROR(check_tensor_scale(name, "", scale));
  return scale;
}

std::string fp4_codes_name(QuantMethod method, const std::string& name) {
  const bool is_packed = method == QuantMethod::kCompressedNvfp4 || method == QuantMethod::kCompressedMxfp4;
  return name + (is_packed ? ".weight_packed" : ".weight");
}

std::string fp4_scales_name(QuantMethod method, const std::string& name) {
  return name + (method == QuantMethod::kFp8Mxfp4 ? ".scale" : ".weight_scale");
}

bool has_fp4_tensors(const Checkpoint& checkpoint, QuantMethod method, const std::string& name) {
  if (method == QuantMethod::kNone || method == QuantMethod::kMxfp4GptOss) return false;
  const TensorEntry* codes = checkpoint.find(fp4_codes_name(method, name));
  return codes != nullptr && (codes->view.dtype == DType::kU8 || codes->view.dtype == DType::kI8);
}

Status check_block_scales(Fp4Format format, const TensorEntry& scales, ExpertRange local, ThreadPool* pool) {
  const TensorView& view = scales.view;
  const size_t rank = view.shape.size();
  const int64_t blocks_per_row = view.shape[rank - 1], rows = view.shape[rank - 2];
  int64_t begin = 0, end = view.num_bytes();
  if (rank == 3) {
    const int64_t first = std::min(local.first, view.shape[0]);
    begin = first * rows * blocks_per_row;
    end = begin + std::min(local.count, view.shape[0] - first) * rows * blocks_per_row;
  }
  const int64_t found = find_bad_scale(format, view.data + begin, end - begin, pool);
  if (found < 0) return {};
  const int64_t at = begin + found, row = at / blocks_per_row;
  char byte[8];
  std::snprintf(byte, sizeof byte, "0x%02X", view.data[at]);
  return data_loss(
      "tensor '" + scales.name + "': scale byte " + byte + " at " +
      (rank == 3 ? "expert " + std::to_string(row / rows) + ", " : "") + "row " + std::to_string(row % rows) +
      ", block " + std::to_string(at % blocks_per_row) +
      "; legal: " + (format == Fp4Format::kMxfp4 ? "e8m0 bytes 0x00 to 0xFE" : "e4m3 bytes 0x00 to 0x7E"));
}

Status undeclared_fp4(const std::string& tensor) {
  return unsupported(
      "the checkpoint declares no FP4 quantization (neither in config.json's quantization_config nor in "
      "hf_quant_config.json), but has '" +
      tensor + "'");
}

Status check_tensor_scale(const std::string& name, const std::string& position, float scale) {
  if (std::isfinite(scale) && scale > 0) return {};
  return data_loss("tensor '" + name + "'" + position + " is " + std::to_string(scale) +
                   "; legal: finite numbers above 0");
}

Result<Fp4Projection> load_fp4_projection(const Checkpoint& checkpoint, QuantMethod method,
                                          const std::string& name, const Fp4Shape& shape) {
  const auto [rows, cols, reads_scales] = shape;
  const Fp4Format format = is_mxfp4(method) ? Fp4Format::kMxfp4 : Fp4Format::kNvfp4;
  const int64_t block = fp4_block(format);
  if (cols % block != 0)
    return invalid_argument("module '" + name + "' has " + std::to_string(cols) +
                            " input features; legal for " + fp4_format_name(format) + ": multiples of " +
                            std::to_string(block));
  const std::string codes_name = fp4_codes_name(method, name), scales_name = fp4_scales_name(method, name);
  const DType code_dtype = one_of(checkpoint, codes_name, DType::kU8, DType::kI8);
  const DType scale_dtype =
      is_mxfp4(method) ? one_of(checkpoint, scales_name, DType::kU8, DType::kF8E8M0) : DType::kF8E4M3;
  FP4MOE_ASSIGN_OR_RETURN(const TensorView codes, checkpoint.get(codes_name, code_dtype, {rows, cols / 2}));
  FP4MOE_ASSIGN_OR_RETURN(const TensorView scales,
                          checkpoint.get(scales_name, scale_dtype, {rows, cols / block}));
  if (reads_scales) FP4MOE_RETURN_IF_ERROR(check_block_scales(format, *checkpoint.find(scales_name)));
  Fp4Projection projection;
  projection.weight = {.format = format,
                       .rows = rows,
                       .cols = cols,
                       .codes = codes.data,
                       .scales = scales.data,
                       .code_stride_bytes = cols / 2,
                       .scale_stride_bytes = cols / block,
                       .tensor_scale = 1};
  if (method == QuantMethod::kModelOptNvfp4)
    FP4MOE_RETURN_IF_ERROR(load_modelopt_scales(checkpoint, name, projection));
  if (method == QuantMethod::kCompressedNvfp4)
    FP4MOE_RETURN_IF_ERROR(load_compressed_scales(checkpoint, name, projection));
  return projection;
}

}  // namespace fp4moe
