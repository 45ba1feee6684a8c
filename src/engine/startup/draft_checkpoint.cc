#include "engine/startup/draft_checkpoint.h"

#include <algorithm>

#include "base/printable.h"
#include "io/checkpoint/eagle3_tensors.h"
#include "io/checkpoint/unused_tensors.h"
#include "io/write/dummy_checkpoint.h"
#include "model/mtp_head.h"

namespace fp4moe {
namespace {

std::string token_text(const Tokenizer& tokenizer, int32_t id) {
  if (!tokenizer.has_token(id)) return "no token";
  return std::string(tokenizer.is_special(id) ? "the special token '" : "'") +
         printable(tokenizer.token_bytes(id)) + "'";
}

Status of_draft(const Status& status, const DraftPlan& draft) {
  return status.with_context("--speculative-draft-model-path " + draft.folder);
}

}  // namespace

Status check_weights(const Checkpoint& target, const ModelConfig& config, const ModelPlan& plan) {
  if (drafts_with_mtp(plan))
    FP4MOE_RETURN_IF_ERROR(check_mtp_layer(target, config)
                               .with_context("--speculative-algorithm " + plan.flags.speculative_algorithm));
  return check_unused_tensors(target, config, plan.flags.allow_unused_tensors, drafts_with_mtp(plan));
}

Result<std::optional<Checkpoint>> open_draft(const DraftPlan* draft, const ModelConfig& target,
                                             const std::string& load_format) {
  if (draft == nullptr || draft->folder.empty()) return std::optional<Checkpoint>();
  if (draft->algorithm == DraftAlgorithm::kEagle3) {
    Result<Checkpoint> head = open_eagle3_head(draft->folder, target);
    if (!head.ok()) return of_draft(head.status(), *draft);
    return std::optional<Checkpoint>(std::move(*head));
  }
  Result<Checkpoint> checkpoint = open_weights(draft->folder, load_format, draft->config);
  if (!checkpoint.ok()) return of_draft(checkpoint.status(), *draft);
  const Status status =
      check_unused_tensors(*checkpoint, draft->config, draft->plan.flags.allow_unused_tensors);
  if (!status.ok()) return of_draft(status, *draft);
  return std::optional<Checkpoint>(std::move(*checkpoint));
}

Status compare_tokenizers(const Tokenizer& target, const Tokenizer& draft) {
  const auto num_ids = static_cast<int32_t>(std::max(target.vocab_size(), draft.vocab_size()));
  for (int32_t id = 0; id < num_ids; ++id) {
    if (target.has_token(id) == draft.has_token(id) && target.token_bytes(id) == draft.token_bytes(id) &&
        target.is_special(id) == draft.is_special(id))
      continue;
    return unsupported("its tokenizer differs from the model's: id " + std::to_string(id) + " is " +
                       token_text(draft, id) + " instead of " + token_text(target, id) +
                       "; a draft model needs the model's vocabulary");
  }
  return {};
}

Status check_draft_tokenizer(const Tokenizer& target, const DraftPlan* draft) {
  if (draft == nullptr || draft->algorithm != DraftAlgorithm::kStandalone) return {};
  const Result<Tokenizer> own = open_tokenizer(draft->folder, draft->plan.flags.load_format);
  return of_draft(own.ok() ? compare_tokenizers(target, *own) : own.status(), *draft);
}

}  // namespace fp4moe
