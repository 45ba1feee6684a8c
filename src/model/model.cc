#include "model/model.h"

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

}  // namespace fp4moe
