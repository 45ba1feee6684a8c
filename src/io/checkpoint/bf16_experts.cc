#include "base/check.h"
#include "io/checkpoint/fp4_tensors.h"
#include "io/checkpoint/stored_experts.h"

namespace fp4moe {
namespace {

// One projection of all experts: [E, rows, cols], or [E, cols, rows] if transposed.
struct FusedBf16 {
  const bf16* data = nullptr;
  int64_t rows = 0, cols = 0;
  bool is_transposed = false;

  // Returns `count` rows of one expert: first, first + step, ...
  Bf16MatrixView expert(int64_t expert, int64_t first, int64_t step, int64_t count) const {
    const int64_t row_stride = is_transposed ? 1 : cols;
    return {.rows = count,
            .cols = cols,
            .data = data + expert * rows * cols + first * row_stride,
            .row_stride = step * row_stride,
            .col_stride = is_transposed ? rows : 1};
  }
};

// gpt-oss: gate and up rows alternate.
Result<std::vector<Bf16ExpertView>> load_fused_pairs(const Checkpoint& checkpoint, const ModelConfig& config,
                                                     const std::string& prefix) {
  const int64_t experts = config.num_experts, h = config.hidden_size, i = config.intermediate_size;
  const auto get = [&](const char* name, std::vector<int64_t> shape) -> Result<const bf16*> {
    FP4MOE_ASSIGN_OR_RETURN(const TensorView view,
                            checkpoint.get(prefix + name, DType::kBF16, std::move(shape)));
    return view.as<bf16>();
  };
  FusedBf16 gate_up{nullptr, 2 * i, h, true}, down{nullptr, h, i, true};
  FP4MOE_ASSIGN_OR_RETURN(gate_up.data, get("gate_up_proj", {experts, h, 2 * i}));
  FP4MOE_ASSIGN_OR_RETURN(const bf16* gate_up_bias, get("gate_up_proj_bias", {experts, 2 * i}));
  FP4MOE_ASSIGN_OR_RETURN(down.data, get("down_proj", {experts, i, h}));
  FP4MOE_ASSIGN_OR_RETURN(const bf16* down_bias, get("down_proj_bias", {experts, h}));
  std::vector<Bf16ExpertView> views;
  for (int64_t e = 0; e < experts; ++e)
    views.push_back({.gate = gate_up.expert(e, 0, 2, i),
                     .up = gate_up.expert(e, 1, 2, i),
                     .down = down.expert(e, 0, 1, h),
                     .gate_bias = gate_up_bias + e * 2 * i,
                     .up_bias = gate_up_bias + e * 2 * i + 1,
                     .down_bias = down_bias + e * h,
                     .gate_up_bias_stride = 2});
  return views;
}

// The types and shapes of gate_up_proj and down_proj.
struct FusedShapes {
  DType gate_up_dtype = DType::kBF16, down_dtype = DType::kBF16;
  std::vector<int64_t> gate_up, down;

  bool operator==(const FusedShapes&) const = default;
  std::string text() const {
    return dtype_name(gate_up_dtype) + (" " + shape_string(gate_up)) + " and " + dtype_name(down_dtype) +
           " " + shape_string(down);
  }
};

// Families without biases: gate rows first. Published tensors are transposed, those that transformers 5 saves
// are not. At most one order matches, because H = 2 I and H = I exclude each other.
Result<std::vector<Bf16ExpertView>> load_fused_halves(const Checkpoint& checkpoint, const ModelConfig& config,
                                                      const std::string& prefix) {
  const int64_t experts = config.num_experts, h = config.hidden_size, i = config.intermediate_size;
  const TensorEntry *gate_up = checkpoint.find(prefix + "gate_up_proj"),
                    *down = checkpoint.find(prefix + "down_proj");
  if (gate_up == nullptr || down == nullptr)
    return not_found("'" + checkpoint.folder() + "' has no tensor '" + prefix +
                     (gate_up == nullptr ? "gate_up_proj'" : "down_proj'"));
  const FusedShapes published{.gate_up = {experts, h, 2 * i}, .down = {experts, i, h}},
      saved{.gate_up = {experts, 2 * i, h}, .down = {experts, h, i}},
      stored{gate_up->view.dtype, down->view.dtype, gate_up->view.shape, down->view.shape};
  if (stored != published && stored != saved)
    return invalid_argument("tensors '" + gate_up->name + "' and '" + down->name + "' are " + stored.text() +
                            "; the model needs " + published.text() + ", or " + saved.text());
  const FusedBf16 gates_ups{gate_up->view.as<bf16>(), 2 * i, h, stored == published},
      downs{down->view.as<bf16>(), h, i, stored == published};
  std::vector<Bf16ExpertView> views;
  for (int64_t e = 0; e < experts; ++e) {
    Bf16ExpertView& view = views.emplace_back();
    view.gate = gates_ups.expert(e, 0, 1, i);
    view.up = gates_ups.expert(e, i, 1, i);
    view.down = downs.expert(e, 0, 1, h);
  }
  return views;
}

Result<std::vector<Bf16ExpertView>> load_per_expert(const Checkpoint& checkpoint, const ModelConfig& config,
                                                    const std::string& prefix) {
  std::vector<Bf16ExpertView> views;
  for (int64_t e = 0; e < config.num_experts; ++e) {
    const auto get = [&](const char* name, int64_t rows, int64_t cols) -> Result<Bf16MatrixView> {
      const std::string tensor = prefix + std::to_string(e) + name + ".weight";
      FP4MOE_ASSIGN_OR_RETURN(const TensorView view, checkpoint.get(tensor, DType::kBF16, {rows, cols}));
      return Bf16MatrixView{rows, cols, view.as<bf16>(), cols, 1};
    };
    Bf16ExpertView expert;
    FP4MOE_ASSIGN_OR_RETURN(expert.gate, get(".gate_proj", config.intermediate_size, config.hidden_size));
    FP4MOE_ASSIGN_OR_RETURN(expert.up, get(".up_proj", config.intermediate_size, config.hidden_size));
    FP4MOE_ASSIGN_OR_RETURN(expert.down, get(".down_proj", config.hidden_size, config.intermediate_size));
    views.push_back(expert);
  }
  return views;
}

}  // namespace

bool has_fused_bf16_experts(const Checkpoint& checkpoint, const std::string& prefix) {
  return checkpoint.find(prefix + "gate_up_proj") != nullptr ||
         checkpoint.find(prefix + "down_proj") != nullptr;
}

Result<MoeWeightsView> load_bf16_experts(const Checkpoint& checkpoint, const ModelConfig& config,
                                         const std::string& prefix) {
  for (const char* name : {"gate_up_proj_blocks", "0.gate_proj.weight_scale", "0.gate_proj.weight_packed"})
    if (checkpoint.find(prefix + name) != nullptr) return undeclared_fp4(prefix + name);
  MoeWeightsView moe{.format = Fp4Format::kNone,
                     .hidden_size = config.hidden_size,
                     .intermediate_size = config.intermediate_size,
                     .experts = {},
                     .bf16_experts = {}};
  const auto load = config.family == ModelFamily::kGptOss        ? load_fused_pairs
                    : has_fused_bf16_experts(checkpoint, prefix) ? load_fused_halves
                                                                 : load_per_expert;
  FP4MOE_ASSIGN_OR_RETURN(moe.bf16_experts, load(checkpoint, config, prefix));
  return moe;
}

}  // namespace fp4moe
