// The parameters of a step loop over a fake executor.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "engine/fake_draft.h"
#include "engine/fake_model.h"
#include "engine/fake_tokenizer.h"
#include "engine/step/step_loop.h"

namespace fp4moe {

// Large because every part of the loop has parameters here.
struct LoopShape {
  int64_t num_pages = 256;
  int page_size = 4;
  int64_t window = 0;            // of layer 1, in tokens; 0: none
  int64_t num_window_pages = 0;  // 0: layer 1 holds all tokens
  int64_t num_slots = 0;         // with slot 0; 0: the model has no state
  SchedulerLimits scheduler{.max_running_requests = 8, .chunked_prefill_size = 16, .max_prefill_tokens = 32};
  int64_t context_length = 128;
  int64_t max_queued_requests = 1000;
  int num_groups = 1;
  bool samples = false;              // whether the executor samples
  bool keeps_draft_ids = false;      // requires `samples`
  bool accepts_drafts = false;       // requires keeps_draft_ids
  int64_t num_cheap_draft_rows = 0;  // requires keeps_draft_ids
  bool supports_routed_experts = true;
  std::function<std::unique_ptr<GrammarCompiler>()> grammars = {};  // empty: no grammars
  bool reuses_prefixes = true;
  double conservativeness = 0;  // 0 reserves no pages for output, so that pages run out often
  TimeLimits time_limits = {};
  PriorityRules priorities = {.are_used = true};
  double watchdog_timeout = 0;
  KvHello hello = {};  // a decode engine if not empty
  MaskLimits masks = {};
  NgramLimits drafts = {};
  int64_t max_model_drafts = 0;
  FakeDraft draft = {};
  DraftSource draft_source = {};  // empty: n-gram drafts
  double synthetic_acceptance = -1;
  std::optional<StepCost> adaptive = {};
  std::vector<int32_t> eos_token_ids = {kEosId};
};

// Returns the shape of its draft model beside a target with a vocabulary of vocab_size.
inline DraftShape draft_shape_of(const LoopShape& shape, int64_t vocab_size) {
  if (shape.draft.model == nullptr) return {};
  DraftShape draft = shape.draft.shape;
  const auto or_default = [](int64_t& size, int64_t value) { size = size > 0 ? size : value; };
  const int64_t num_decode_rows = shape.scheduler.max_running_requests * (1 + shape.max_model_drafts);
  draft.vocab_size = shape.draft.model->config().vocab_size;
  draft.takes_features = dynamic_cast<FakeFeatureDraft*>(shape.draft.model) != nullptr;
  or_default(draft.num_input_ids, draft.takes_features ? vocab_size : draft.vocab_size);
  or_default(draft.max_positions, shape.context_length);
  or_default(draft.max_batch_tokens, shape.scheduler.max_prefill_tokens + num_decode_rows);
  or_default(draft.max_logit_rows, shape.scheduler.max_running_requests + shape.num_groups);
  return draft;
}

}  // namespace fp4moe
