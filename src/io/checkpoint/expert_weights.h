// Typed views of the experts of one MoE layer as the checkpoint stores them; no data is moved. All dialects
// are converted to this form, so runners know formats but not dialects.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "formats/fp4_matrix.h"
#include "formats/fp8_matrix.h"
#include "io/checkpoint/checkpoint.h"
#include "io/config/model_config.h"

namespace fp4moe {

// gate and up are [I, H], down is [H, I]. Biases are null if the model has none. Bias element i is at
// bias[i * stride] (gpt-oss interleaves gate and up: stride 2).
struct ExpertWeightsView {
  Fp4MatrixView gate, up, down;
  const bf16* gate_bias = nullptr;
  const bf16* up_bias = nullptr;
  const bf16* down_bias = nullptr;
  int64_t gate_up_bias_stride = 1;
  // Calibrated activation scales, decode direction (amax / 2688); 1.0 if the checkpoint has none.
  float gate_input_scale = 1, up_input_scale = 1, down_input_scale = 1;
};

// [rows, cols] bf16; element (r, c) is at data[r * row_stride + c * col_stride]: gpt-oss and Qwen3-VL store
// their experts transposed, gpt-oss with alternating gate and up columns.
struct Bf16MatrixView {
  int64_t rows = 0, cols = 0;
  const bf16* data = nullptr;
  int64_t row_stride = 0, col_stride = 1;
};

// An expert of an unquantised checkpoint; shapes as in ExpertWeightsView.
struct Bf16ExpertView {
  Bf16MatrixView gate, up, down;
  const bf16* gate_bias = nullptr;
  const bf16* up_bias = nullptr;
  const bf16* down_bias = nullptr;
  int64_t gate_up_bias_stride = 1;
};

struct MoeWeightsView {
  Fp4Format format = Fp4Format::kMxfp4;
  int64_t hidden_size = 0, intermediate_size = 0;
  std::vector<ExpertWeightsView> experts;    // [E]; empty with kNone
  std::vector<Bf16ExpertView> bf16_experts;  // [E] with kNone
};

// A linear layer outside the routed experts: FP4, FP8, or bf16 if the checkpoint did not quantise it.
struct LinearWeightsView {
  bool is_fp4 = false;
  Fp4MatrixView fp4;      // [N, K]
  float input_scale = 1;  // for fp4, decode direction; 1 if the checkpoint has none
  Fp8LinearView fp8;      // [N, K], if is_fp8(); its scales are those of fp8_scales
  std::shared_ptr<const std::vector<float>> fp8_scales;
  const bf16* weight = nullptr;  // [N, K] row-major, if neither FP4 nor FP8
  const bf16* bias = nullptr;    // [N] or null
  int64_t n = 0, k = 0;
  // The checkpoint tensors behind weight and bias, or null; for check_finite().
  const TensorEntry* weight_tensor = nullptr;
  const TensorEntry* bias_tensor = nullptr;

  bool is_fp8() const { return fp8.codes != nullptr; }
};

// A gated MLP applied to every token: a shared expert, or the MLP of a layer without experts.
struct MlpWeightsView {
  int64_t hidden_size = 0, intermediate_size = 0;
  LinearWeightsView gate, up, down;  // [I, H], [I, H], [H, I]; all FP4 in one format, all FP8, or all bf16
};

// Loads "<name>.weight" and its scales: FP4 if the checkpoint has FP4 tensors of that name and the
// quantization declaration does not exclude the module (kInvalidArgument if the two contradict); FP8 if the
// weight is F8_E4M3 with a scale beside it, even if the declaration excludes the module; else bf16. Makes the
// same checks as load_expert_weights(). has_bias: requires "<name>.bias".
Result<LinearWeightsView> load_linear_weights(const Checkpoint& checkpoint, const ModelConfig& config,
                                              const std::string& name, int64_t n, int64_t k,
                                              bool has_bias = false);
// Loads "<prefix>.gate_proj", "<prefix>.up_proj" and "<prefix>.down_proj".
Result<MlpWeightsView> load_mlp_weights(const Checkpoint& checkpoint, const ModelConfig& config,
                                        const std::string& prefix, int64_t intermediate_size);

// Experts [first, first + count), clipped to the experts that exist.
struct ExpertRange {
  int64_t first = 0, count = INT64_MAX;
  constexpr bool contains(int64_t expert) const { return expert >= first && expert - first < count; }
};

// Finds, checks (names, dtypes, shapes, finite positive scales, no 0xFF e8m0 byte) and types all experts of
// layer `layer`. Errors name the tensor, the found and the required values and, for scales, the expert and
// position. Block scales, at most a ninth of the bytes, are read only for `local` experts, so a rank does not
// touch the other ranks' pages; the threads of `pool` share the work unless it is null. A checkpoint without
// a quantization declaration has bf16 experts.
Result<MoeWeightsView> load_expert_weights(const Checkpoint& checkpoint, const ModelConfig& config,
                                           int64_t layer, ExpertRange local = {}, ThreadPool* pool = nullptr);

// Returns the format of a layer's routed experts according to their tensors; kNone: not in FP4.
Fp4Format stored_expert_format(const Checkpoint& checkpoint, const ModelConfig& config, int64_t layer);
// Loads bf16 experts, whatever the declaration says about them (an MTP layer that it leaves unquantised);
// errors as above.
Result<MoeWeightsView> load_unquantised_experts(const Checkpoint& checkpoint, const ModelConfig& config,
                                                int64_t layer);

// kDataLoss if a bf16 value of the `local` experts is not finite (finite_check.h): always checks the biases,
// and with `with_matrices` also the matrices of experts that are not FP4. Precondition: load_expert_weights()
// succeeded for the layer.
Status check_experts_finite(const Checkpoint& checkpoint, const ModelConfig& config, int64_t layer,
                            ExpertRange local, bool with_matrices, ThreadPool& pool);

}  // namespace fp4moe
