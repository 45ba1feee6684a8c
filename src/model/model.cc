#include "model/model.h"

#include "base/check.h"
#include "model/families.h"

namespace fp4moe {
LayerLoader layer_loader(ModelFamily family) {
  switch (family) {
    case ModelFamily::kGptOss:
      return load_gpt_oss_layer;
    case ModelFamily::kDeepseekV3:
      return load_deepseek_v3_layer;
    case ModelFamily::kQwen3Moe:
      return load_qwen3_moe_layer;
    case ModelFamily::kQwen2Moe:
      return load_qwen2_moe_layer;
    case ModelFamily::kGlm4Moe:
      return load_glm4_moe_layer;
    case ModelFamily::kQwen3Next:
      return load_qwen3_next_layer;
    case ModelFamily::kEagle3Head:
      break;  // load_eagle3_head()
  }
  return nullptr;
}

Result<std::unique_ptr<Model>> Model::load(const Checkpoint& checkpoint, const ModelConfig& config,
                                           const ModelOptions& options, ThreadPool& pool,
                                           const ProgressSink& progress) {
  return load_decoder(checkpoint, config, options, layer_loader(config.family), pool, progress);
}

void check_feature_rows(const Batch& batch, const Features& from, int64_t width) {
  FP4MOE_CHECK(from.data != nullptr && from.dtype == DType::kF32 && from.width == width,
               "features of width " + std::to_string(from.width) + " instead of " + std::to_string(width));
  if (batch.device != nullptr) return;
  FP4MOE_CHECK(std::ssize(batch.feature_rows) == batch.num_rows(),
               std::to_string(batch.feature_rows.size()) + " feature rows for " +
                   std::to_string(batch.num_rows()) + " rows");
  for (const int64_t row : batch.feature_rows)
    FP4MOE_CHECK(row >= 0 && row < from.num_rows,
                 "feature row " + std::to_string(row) + " of " + std::to_string(from.num_rows));
}

}  // namespace fp4moe
