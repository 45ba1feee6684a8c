#include "io/expert_weights.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>

#include "base/check.h"

namespace fp4moe {
namespace {

// A scale tensor of experts' rows: [..., rows, blocks_per_row] bytes.
struct ScaleBytes {
  const TensorView& view;
  int64_t rows, blocks_per_row;
};

// Position of the first byte that is no scale, or -1. Legal are e8m0 bytes other than 0xFF (NaN), and e4m3
// bytes without sign bit other than 0x7F (NaN).
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

Status check_scales(Fp4Format format, const std::string& name, const ScaleBytes& scales) {
  const int64_t at = find_bad_scale(format, scales.view.data, scales.view.num_bytes());
  if (at < 0) return {};
  const int64_t row = at / scales.blocks_per_row;
  char byte[8];
  std::snprintf(byte, sizeof byte, "0x%02X", scales.view.data[at]);
  const bool fused = scales.view.shape.size() == 3;  // [E, rows, blocks]
  return data_loss("tensor '" + name + "': scale byte " + byte + " at " +
                   (fused ? "expert " + std::to_string(row / scales.rows) + ", " : "") + "row " +
                   std::to_string(row % scales.rows) + ", block " +
                   std::to_string(at % scales.blocks_per_row) + "; legal are " +
                   (format == Fp4Format::kMxfp4 ? "e8m0 bytes 0x00 to 0xFE" : "e4m3 bytes 0x00 to 0x7E"));
}

// ---- gpt-oss: all experts of a projection in one tensor, gate and up rows alternating.

// Views of the experts' rows of one fused projection.
struct FusedProjection {
  const uint8_t* codes = nullptr;   // [E, rows, cols / 2]
  const uint8_t* scales = nullptr;  // [E, rows, cols / 32]
  const bf16* bias = nullptr;       // [E, rows]
  int64_t rows = 0, cols = 0;

  // Rows first_row, first_row + row_step, ... of one expert.
  Fp4MatrixView expert(int64_t expert, int64_t first_row, int64_t row_step) const {
    const int64_t row = expert * rows + first_row;
    return {.format = Fp4Format::kMxfp4,
            .rows = rows / row_step,
            .cols = cols,
            .codes = codes + row * (cols / 2),
            .scales = scales + row * (cols / 32),
            .code_stride_bytes = row_step * (cols / 2),
            .scale_stride_bytes = row_step * (cols / 32),
            .tensor_scale = 1};
  }
};

Result<FusedProjection> load_fused(const Checkpoint& checkpoint, const std::string& prefix,
                                   int64_t num_experts, int64_t rows, int64_t cols) {
  const std::string scales_name = prefix + "_scales";
  FP4MOE_ASSIGN_OR_RETURN(const TensorView codes,
                          checkpoint.get(prefix + "_blocks", DType::kU8, {num_experts, rows, cols / 32, 16}));
  FP4MOE_ASSIGN_OR_RETURN(const TensorView scales,
                          checkpoint.get(scales_name, DType::kU8, {num_experts, rows, cols / 32}));
  FP4MOE_ASSIGN_OR_RETURN(const TensorView bias,
                          checkpoint.get(prefix + "_bias", DType::kBF16, {num_experts, rows}));
  FP4MOE_RETURN_IF_ERROR(check_scales(Fp4Format::kMxfp4, scales_name, {scales, rows, cols / 32}));
  return FusedProjection{
      .codes = codes.data, .scales = scales.data, .bias = bias.as<bf16>(), .rows = rows, .cols = cols};
}

Result<MoeWeightsView> load_gpt_oss(const Checkpoint& checkpoint, const ModelConfig& config,
                                    const std::string& prefix) {
  const int64_t hidden = config.hidden_size, intermediate = config.intermediate_size;
  FP4MOE_ASSIGN_OR_RETURN(
      const FusedProjection gate_up,
      load_fused(checkpoint, prefix + "gate_up_proj", config.num_experts, 2 * intermediate, hidden));
  FP4MOE_ASSIGN_OR_RETURN(const FusedProjection down, load_fused(checkpoint, prefix + "down_proj",
                                                                 config.num_experts, hidden, intermediate));
  MoeWeightsView moe{
      .format = Fp4Format::kMxfp4, .hidden_size = hidden, .intermediate_size = intermediate, .experts = {}};
  for (int64_t e = 0; e < config.num_experts; ++e)
    moe.experts.push_back({.gate = gate_up.expert(e, 0, 2),
                           .up = gate_up.expert(e, 1, 2),
                           .down = down.expert(e, 0, 1),
                           .gate_bias = gate_up.bias + e * 2 * intermediate,
                           .up_bias = gate_up.bias + e * 2 * intermediate + 1,
                           .down_bias = down.bias + e * hidden,
                           .gate_up_bias_stride = 2});
  return moe;
}

// ---- ModelOpt NVFP4: four tensors for each projection of each expert.

// A tensor-wide scale; `absent` where the checkpoint need not have it.
Result<float> load_tensor_scale(const Checkpoint& checkpoint, const std::string& name) {
  const TensorEntry* entry = checkpoint.find(name);
  // Exporters write scalars as [] or [1].
  const bool one_element = entry != nullptr && entry->view.shape == std::vector<int64_t>{1};
  FP4MOE_ASSIGN_OR_RETURN(
      const TensorView view,
      checkpoint.get(name, DType::kF32, one_element ? std::vector<int64_t>{1} : std::vector<int64_t>{}));
  const float scale = *view.as<float>();
  if (!(std::isfinite(scale) && scale > 0))
    return data_loss("tensor '" + name + "' is " + std::to_string(scale) +
                     "; legal are finite numbers above 0");
  return scale;
}

struct Nvfp4Projection {
  Fp4MatrixView weight;
  float input_scale = 1;
};

Result<Nvfp4Projection> load_nvfp4(const Checkpoint& checkpoint, const std::string& prefix, int64_t rows,
                                   int64_t cols) {
  const std::string scales_name = prefix + ".weight_scale", input_name = prefix + ".input_scale";
  FP4MOE_ASSIGN_OR_RETURN(const TensorView codes,
                          checkpoint.get(prefix + ".weight", DType::kU8, {rows, cols / 2}));
  FP4MOE_ASSIGN_OR_RETURN(const TensorView scales,
                          checkpoint.get(scales_name, DType::kF8E4M3, {rows, cols / 16}));
  FP4MOE_RETURN_IF_ERROR(check_scales(Fp4Format::kNvfp4, scales_name, {scales, rows, cols / 16}));
  FP4MOE_ASSIGN_OR_RETURN(const float tensor_scale,
                          load_tensor_scale(checkpoint, prefix + ".weight_scale_2"));
  Nvfp4Projection projection{.weight = {.format = Fp4Format::kNvfp4,
                                        .rows = rows,
                                        .cols = cols,
                                        .codes = codes.data,
                                        .scales = scales.data,
                                        .code_stride_bytes = cols / 2,
                                        .scale_stride_bytes = cols / 16,
                                        .tensor_scale = tensor_scale}};
  if (checkpoint.find(input_name) != nullptr) {  // weight-only exports have none
    FP4MOE_ASSIGN_OR_RETURN(projection.input_scale, load_tensor_scale(checkpoint, input_name));
  }
  return projection;
}

Result<MoeWeightsView> load_modelopt(const Checkpoint& checkpoint, const ModelConfig& config,
                                     const std::string& prefix) {
  const int64_t hidden = config.hidden_size, intermediate = config.intermediate_size;
  MoeWeightsView moe{
      .format = Fp4Format::kNvfp4, .hidden_size = hidden, .intermediate_size = intermediate, .experts = {}};
  for (int64_t e = 0; e < config.num_experts; ++e) {
    const std::string expert = prefix + std::to_string(e);
    FP4MOE_ASSIGN_OR_RETURN(const Nvfp4Projection gate,
                            load_nvfp4(checkpoint, expert + ".gate_proj", intermediate, hidden));
    FP4MOE_ASSIGN_OR_RETURN(const Nvfp4Projection up,
                            load_nvfp4(checkpoint, expert + ".up_proj", intermediate, hidden));
    FP4MOE_ASSIGN_OR_RETURN(const Nvfp4Projection down,
                            load_nvfp4(checkpoint, expert + ".down_proj", hidden, intermediate));
    moe.experts.push_back({.gate = gate.weight,
                           .up = up.weight,
                           .down = down.weight,
                           .gate_input_scale = gate.input_scale,
                           .up_input_scale = up.input_scale,
                           .down_input_scale = down.input_scale});
  }
  return moe;
}

}  // namespace

Result<MoeWeightsView> load_expert_weights(const Checkpoint& checkpoint, const ModelConfig& config,
                                           int64_t layer) {
  FP4MOE_CHECK(layer >= 0 && layer < config.num_layers,
               "layer " + std::to_string(layer) + " of " + std::to_string(config.num_layers));
  if (!config.layer_has_experts.empty() && !config.layer_has_experts[static_cast<size_t>(layer)])
    return invalid_argument("layer " + std::to_string(layer) + " has a dense MLP, no experts");
  const std::string prefix = "model.layers." + std::to_string(layer) + ".mlp.experts.";
  switch (config.quant.method) {
    case QuantMethod::kMxfp4GptOss:
      return load_gpt_oss(checkpoint, config, prefix);
    case QuantMethod::kModelOptNvfp4:
      return load_modelopt(checkpoint, config, prefix);
    case QuantMethod::kCompressedNvfp4:
    case QuantMethod::kCompressedMxfp4:
    case QuantMethod::kNone:
      break;
  }
  return unsupported(
      "'" + checkpoint.folder() +
      "' declares no quantization; supported are MXFP4 (gpt-oss) and NVFP4 (modelopt) experts");
}

}  // namespace fp4moe
