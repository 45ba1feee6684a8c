#include "model/draft_models.h"

#include "model/mtp_head.h"

namespace fp4moe {

Result<std::unique_ptr<Model>> load_draft_model(const Checkpoint& draft, const DraftModelOptions& options,
                                                const Model& target, ThreadPool& pool,
                                                const ProgressSink& progress) {
  switch (options.algorithm) {
    case DraftAlgorithm::kMtp:
      return load_mtp_head(draft, options.model, target, pool, progress);
    case DraftAlgorithm::kEagle3:
      return unsupported("drafts by an EAGLE-3 head are not supported");
    case DraftAlgorithm::kStandalone:
      return Model::load(draft, options.config, options.model, pool, progress);
  }
  return internal_error("unknown draft algorithm " + std::to_string(static_cast<int>(options.algorithm)));
}

}  // namespace fp4moe
