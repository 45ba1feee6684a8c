#include "base/check.h"
#include "io/checkpoint/fp4_tensors.h"
#include "io/checkpoint/stored_experts.h"

namespace fp4moe {
namespace {

// One projection of all experts.
struct FusedProjection {
  Fp4Format format = Fp4Format::kMxfp4;
  const uint8_t* codes = nullptr;   // [E, rows, cols / 2]
  const uint8_t* scales = nullptr;  // [E, rows, cols / block]
  int64_t rows = 0, cols = 0;

  // Returns `count` rows of one expert: first, first + step, ...
  Fp4MatrixView expert(int64_t expert, int64_t first, int64_t step, int64_t count) const {
    const int64_t row = expert * rows + first, blocks = cols / fp4_block(format);
    return {.format = format,
            .rows = count,
            .cols = cols,
            .codes = codes + row * (cols / 2),
            .scales = scales + row * blocks,
            .code_stride_bytes = step * (cols / 2),
            .scale_stride_bytes = step * blocks,
            .tensor_scale = 1};
  }
};

// The expected shape of one projection of all experts.
struct FusedShape {
  int64_t num_experts, rows, cols;
  ExpertRange local;
  ThreadPool* pool;  // or null
};

// ---- gpt-oss

Result<FusedProjection> load_gpt_oss(const Checkpoint& checkpoint, const std::string& prefix,
                                     const FusedShape& shape) {
  const auto [num_experts, rows, cols, local, pool] = shape;
  const std::string scales_name = prefix + "_scales";
  FP4MOE_ASSIGN_OR_RETURN(const TensorView codes,
                          checkpoint.get(prefix + "_blocks", DType::kU8, {num_experts, rows, cols / 32, 16}));
  FP4MOE_ASSIGN_OR_RETURN(const TensorView scales,
                          checkpoint.get(scales_name, DType::kU8, {num_experts, rows, cols / 32}));
  FP4MOE_RETURN_IF_ERROR(check_block_scales(Fp4Format::kMxfp4, *checkpoint.find(scales_name), local, pool));
  return FusedProjection{Fp4Format::kMxfp4, codes.data, scales.data, rows, cols};
}

// ---- ModelOpt

// A scale per expert and column (gate, up), or one value for all.
class ExpertScales {
 public:
  // kNotFound if there is no such tensor.
  static Result<ExpertScales> load(const Checkpoint& checkpoint, const std::string& name, int64_t num_experts,
                                   int64_t max_columns) {
    const TensorEntry* entry = checkpoint.find(name);
    const std::vector<int64_t> shape = entry == nullptr ? std::vector<int64_t>{} : entry->view.shape;
    const bool is_single = shape.empty() || (shape.size() == 1 && shape[0] == 1);
    const bool has_columns = shape.size() == 2 && shape[1] <= max_columns;
    std::vector<int64_t> wanted = {num_experts};
    if (is_single) wanted = shape;
    if (has_columns) wanted.push_back(shape[1]);
    FP4MOE_ASSIGN_OR_RETURN(const TensorView view, checkpoint.get(name, DType::kF32, wanted));
    ExpertScales scales;
    scales.values_ = view.as<float>();
    scales.expert_stride_ = is_single ? 0 : has_columns ? shape[1] : 1;
    scales.column_stride_ = has_columns && shape[1] == 2 ? 1 : 0;
    for (int64_t i = 0; i < view.num_elems(); ++i)
      FP4MOE_RETURN_IF_ERROR(check_tensor_scale(name, "[" + std::to_string(i) + "]", scales.values_[i]));
    return scales;
  }

  float at(int64_t expert, int64_t column) const {
    return values_ == nullptr ? 1 : values_[expert * expert_stride_ + column * column_stride_];
  }

 private:
  const float* values_ = nullptr;  // null: 1 for all
  int64_t expert_stride_ = 0, column_stride_ = 0;
};

struct FusedNvfp4 {
  FusedProjection rows;
  ExpertScales weight, input;
};

// `halves`: 2 for gate_up_proj, 1 for down_proj.
Result<FusedNvfp4> load_modelopt(const Checkpoint& checkpoint, const std::string& name, int64_t halves,
                                 const FusedShape& shape) {
  const auto [num_experts, rows, cols, local, pool] = shape;
  const std::string scales_name = name + ".weight_scale", input_name = name + ".input_scale";
  FP4MOE_ASSIGN_OR_RETURN(const TensorView codes,
                          checkpoint.get(name + ".weight", DType::kU8, {num_experts, rows, cols / 2}));
  FP4MOE_ASSIGN_OR_RETURN(const TensorView scales,
                          checkpoint.get(scales_name, DType::kF8E4M3, {num_experts, rows, cols / 16}));
  FP4MOE_RETURN_IF_ERROR(check_block_scales(Fp4Format::kNvfp4, *checkpoint.find(scales_name), local, pool));
  FusedNvfp4 fused;
  fused.rows = {Fp4Format::kNvfp4, codes.data, scales.data, rows, cols};
  FP4MOE_ASSIGN_OR_RETURN(fused.weight,
                          ExpertScales::load(checkpoint, name + ".weight_scale_2", num_experts, halves));
  if (checkpoint.find(input_name) != nullptr) {
    FP4MOE_ASSIGN_OR_RETURN(fused.input, ExpertScales::load(checkpoint, input_name, num_experts, halves));
  }
  return fused;
}

}  // namespace

Result<MoeWeightsView> load_gpt_oss_experts(const Checkpoint& checkpoint, const ModelConfig& config,
                                            const std::string& prefix, ExpertRange local, ThreadPool* pool) {
  const int64_t num_experts = config.num_experts, hidden = config.hidden_size,
                inter = config.intermediate_size;
  const std::string gate_up_name = prefix + "gate_up_proj", down_name = prefix + "down_proj";
  FP4MOE_ASSIGN_OR_RETURN(
      const FusedProjection gate_up,
      load_gpt_oss(checkpoint, gate_up_name, {num_experts, 2 * inter, hidden, local, pool}));
  FP4MOE_ASSIGN_OR_RETURN(const TensorView gate_up_bias,
                          checkpoint.get(gate_up_name + "_bias", DType::kBF16, {num_experts, 2 * inter}));
  FP4MOE_ASSIGN_OR_RETURN(const FusedProjection down,
                          load_gpt_oss(checkpoint, down_name, {num_experts, hidden, inter, local, pool}));
  FP4MOE_ASSIGN_OR_RETURN(const TensorView down_bias,
                          checkpoint.get(down_name + "_bias", DType::kBF16, {num_experts, hidden}));
  MoeWeightsView moe{.format = Fp4Format::kMxfp4,
                     .hidden_size = hidden,
                     .intermediate_size = inter,
                     .experts = {},
                     .bf16_experts = {}};
  for (int64_t e = 0; e < num_experts; ++e)
    moe.experts.push_back({.gate = gate_up.expert(e, 0, 2, inter),
                           .up = gate_up.expert(e, 1, 2, inter),
                           .down = down.expert(e, 0, 1, hidden),
                           .gate_bias = gate_up_bias.as<bf16>() + e * 2 * inter,
                           .up_bias = gate_up_bias.as<bf16>() + e * 2 * inter + 1,
                           .down_bias = down_bias.as<bf16>() + e * hidden,
                           .gate_up_bias_stride = 2});
  return moe;
}

Result<MoeWeightsView> load_fused_modelopt_experts(const Checkpoint& checkpoint, const ModelConfig& config,
                                                   const std::string& prefix, ExpertRange local,
                                                   ThreadPool* pool) {
  const int64_t num_experts = config.num_experts, hidden = config.hidden_size,
                inter = config.intermediate_size;
  FP4MOE_ASSIGN_OR_RETURN(
      const FusedNvfp4 gate_up,
      load_modelopt(checkpoint, prefix + "gate_up_proj", 2, {num_experts, 2 * inter, hidden, local, pool}));
  FP4MOE_ASSIGN_OR_RETURN(const FusedNvfp4 down, load_modelopt(checkpoint, prefix + "down_proj", 1,
                                                               {num_experts, hidden, inter, local, pool}));
  MoeWeightsView moe{.format = Fp4Format::kNvfp4,
                     .hidden_size = hidden,
                     .intermediate_size = inter,
                     .experts = {},
                     .bf16_experts = {}};
  for (int64_t e = 0; e < num_experts; ++e) {
    ExpertWeightsView expert{.gate = gate_up.rows.expert(e, 0, 1, inter),
                             .up = gate_up.rows.expert(e, inter, 1, inter),
                             .down = down.rows.expert(e, 0, 1, hidden),
                             .gate_input_scale = gate_up.input.at(e, 0),
                             .up_input_scale = gate_up.input.at(e, 1),
                             .down_input_scale = down.input.at(e, 0)};
    expert.gate.tensor_scale = gate_up.weight.at(e, 0);
    expert.up.tensor_scale = gate_up.weight.at(e, 1);
    expert.down.tensor_scale = down.weight.at(e, 0);
    moe.experts.push_back(expert);
  }
  return moe;
}

}  // namespace fp4moe
