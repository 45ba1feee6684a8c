#include "model/draft_models.h"

#include "base/check.h"
#include "model/eagle3_head.h"
#include "model/mtp_head.h"

namespace fp4moe {
namespace {

Result<std::unique_ptr<Model>> load_eagle3(const Checkpoint& draft, const ModelOptions& options,
                                           const Model& target, ThreadPool& pool,
                                           const ProgressSink& progress) {
  FP4MOE_ASSIGN_OR_RETURN(const Eagle3Config config, load_eagle3_config(draft.folder(), target.config()));
  return load_eagle3_head(draft, config, options, target, pool, progress);
}

}  // namespace

Result<std::unique_ptr<Model>> load_draft_model(const Checkpoint& draft, const DraftModelOptions& options,
                                                const Model& target, ThreadPool& pool,
                                                const ProgressSink& progress) {
  switch (options.algorithm) {
    case DraftAlgorithm::kMtp:
      return load_mtp_head(draft, options.model, target, pool, progress);
    case DraftAlgorithm::kEagle3:
      return load_eagle3(draft, options.model, target, pool, progress);
    case DraftAlgorithm::kStandalone:
      return Model::load(draft, options.config, options.model, pool, progress);
  }
  return internal_error("unknown draft algorithm " + std::to_string(static_cast<int>(options.algorithm)));
}

}  // namespace fp4moe
