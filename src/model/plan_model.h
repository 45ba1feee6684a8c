// What a checkpoint and the flags come to, decided and checked before any weight is read.
#pragma once

#include <string>

#include "base/cpu_info.h"
#include "base/dtype.h"
#include "device/device.h"
#include "fp4moe/config.h"
#include "io/model_config.h"
#include "kernels/ops.h"
#include "moe/plan.h"

namespace fp4moe {

struct ModelPlan {
  DType act_dtype = DType::kBF16;
  Isa isa = Isa::kScalar;  // of the dense ops
  DenseQuant dense_quant = DenseQuant::kNone;
  MoePlan moe;         // its problem says on which device
  EngineConfig flags;  // resolved: no automatic choice that resolve_flags() makes is left open

  DeviceKind device() const { return moe.problem().device; }
};

// Resolves the flags, says in the log what was chosen for the user, and plans. kInvalidArgument: a flag's
// value is unknown or out of range; kUnsupported: --quantization against the checkpoint, or a combination
// that this version has no row for.
Result<ModelPlan> plan_model(const ModelConfig& model, const EngineConfig& given);

// "mxfp4", "modelopt_fp4" or "none": the checkpoint's scheme in --quantization's words.
const char* quantization_name(const QuantConfig& quant);

}  // namespace fp4moe
