// ModelPlan: how a checkpoint runs with the given flags, decided and checked before any weight is read.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "base/cpu_info.h"
#include "base/dtype.h"
#include "device/absent_gpu.h"
#include "device/device.h"
#include "fp4moe/config.h"
#include "io/config/model_config.h"
#include "kernels/ops.h"
#include "moe/plan/plan.h"

namespace fp4moe {

struct DraftPlan;

struct ModelPlan {
  DType act_dtype = DType::kBF16;
  DType kv_dtype = DType::kBF16;  // of KV pages: act_dtype or kF8E4M3
  Isa isa = Isa::kScalar;         // CPU: instruction set of the dense ops
  DenseQuant dense_quant = DenseQuant::kNone;
  MoePlan moe;                                         // its problem names the device
  std::shared_ptr<const ExpertPlacements> placements;  // of the experts at load; null: moe places none
  std::optional<AbsentGpu> absent_gpu;     // the plan is for this GPU instead of this machine's GPUs
  EngineConfig flags;                      // resolved by resolve_flags(), with the device's defaults
  std::shared_ptr<const DraftPlan> draft;  // set by plan_draft() (model/plan_draft.h); null: no draft model

  DeviceKind device() const { return moe.problem().device; }
  int gpu() const { return moe.problem().gpu(); }  // ordinal of the rank's GPU
};

// Resolves the flags, logs automatic choices, and plans. kInvalidArgument: a flag's value is unknown or out
// of range; kUnsupported: --quantization contradicts the checkpoint, or no table row (moe/table.h) supports
// the combination. absent_gpu: plan for one such GPU per rank instead of this machine's GPUs.
Result<ModelPlan> plan_model(const ModelConfig& model, const EngineConfig& given,
                             const std::optional<AbsentGpu>& absent_gpu = {});

// kUnsupported: the attention ops of the problem's device do not take the model's heads, or the ranks of a
// group cannot share them. `problem`: only its device and layout are used.
Status check_attention(const ModelConfig& model, const MoeProblem& problem);

// kUnsupported: the model has layers with states, and the device, the ranks of a group or a flag do not
// support them.
Status check_states(const ModelConfig& model, const MoeProblem& problem, const EngineConfig& flags);

// Returns the --quantization value for the checkpoint's scheme: "mxfp4", "modelopt_fp4",
// "compressed-tensors", or "none".
const char* quantization_name(const QuantConfig& quant);

}  // namespace fp4moe
