// Draft models for speculative decoding: each is a Model whose batches have Batch::model = kDraft.
//
//   algorithm   checkpoint            takes                                         layers
//   MTP         the target's          tokens, the target's final hidden states      the MTP layer
//   EAGLE-3     its own               tokens, the residuals after some layers       one or more of its own
//   STANDALONE  its own               tokens                                        a whole model's
#pragma once

#include <memory>

#include "model/model.h"

namespace fp4moe {

enum class DraftAlgorithm : int32_t { kMtp, kEagle3, kStandalone };

struct DraftModelOptions {
  DraftAlgorithm algorithm = DraftAlgorithm::kStandalone;
  ModelConfig config;  // of the draft: its layers' KV and its vocabulary, i.e. the columns of its logits
  ModelOptions model;
};

// Loads the draft model of options.algorithm from `draft`. `target`: loaded, outlives the result.
Result<std::unique_ptr<Model>> load_draft_model(const Checkpoint& draft, const DraftModelOptions& options,
                                                const Model& target, ThreadPool& pool,
                                                const ProgressSink& progress);

}  // namespace fp4moe
