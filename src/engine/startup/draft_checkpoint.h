// The weights of a draft model: checks those that are the target's; opens a separate checkpoint, and checks
// that its token ids mean what the target's do.
#pragma once

#include <optional>

#include "fp4moe/status.h"
#include "io/checkpoint/checkpoint.h"
#include "io/tokenizer/tokenizer.h"
#include "model/plan_draft.h"

namespace fp4moe {

// Checks the target's checkpoint: tensors that no model uses, and the MTP layer, if plan.draft is that.
Status check_weights(const Checkpoint& target, const ModelConfig& config, const ModelPlan& plan);

// Opens the checkpoint; nothing if `draft` is null or its weights are the target's. Errors name the folder.
// An EAGLE-3 head's tensors are read from the folder with every load format.
Result<std::optional<Checkpoint>> open_draft(const DraftPlan* draft, const ModelConfig& target,
                                             const std::string& load_format);

// Compares the tokens of all ids: their bytes, and whether they are special. kUnsupported names the first id
// that differs, with both tokens.
Status compare_tokenizers(const Tokenizer& target, const Tokenizer& draft);

// Does the same with the tokenizer in the folder of a draft that is a whole model; OK for other drafts, and
// null.
Status check_draft_tokenizer(const Tokenizer& target, const DraftPlan* draft);

}  // namespace fp4moe
