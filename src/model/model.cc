#include "model/model.h"

#include "model/gpt_oss.h"

namespace fp4moe {

Result<std::unique_ptr<Model>> Model::load(const Checkpoint& checkpoint, const ModelConfig& config,
                                           const ModelOptions& options, ThreadPool& pool,
                                           const ProgressSink& progress) {
  switch (config.family) {
    case ModelFamily::kGptOss:
      return load_decoder(checkpoint, config, options, load_gpt_oss_layer, pool, progress);
    case ModelFamily::kDeepseekV3:
    case ModelFamily::kQwen3Moe:
    case ModelFamily::kQwen2Moe:
      break;
  }
  return unsupported("architecture " + config.architecture +
                     " can be read but not run in this version; it runs "
                     "GptOssForCausalLM");
}

}  // namespace fp4moe
