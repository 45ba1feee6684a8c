// SourceDrafter: drafts what a function of the host program proposes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/step/drafter.h"
#include "fp4moe/sinks.h"

namespace fp4moe {

// Keeps at most max_tokens ids of a proposal, up to the first one outside the vocabulary.
class SourceDrafter final : public Drafter {
 public:
  SourceDrafter(DraftSource source, int64_t max_tokens, int64_t vocab_size)
      : source_(std::move(source)), max_tokens_(max_tokens), vocab_size_(vocab_size) {}

  Status draft(DpScheduler& scheduler) override {
    listed_.clear();
    scheduler.list(listed_);
    for (Sequence* sequence : listed_) {
      std::vector<int32_t>& ids = sequence->draft.ids;
      ids.clear();
      if (!may_draft(*sequence)) continue;
      ids = source_(sequence->token_ids, max_tokens_);
      ids.resize(std::min(ids.size(), static_cast<size_t>(max_tokens_)));
      const auto is_bad = [this](int32_t id) { return id < 0 || id >= vocab_size_; };
      ids.erase(std::ranges::find_if(ids, is_bad), ids.end());
    }
    return {};
  }

 private:
  const DraftSource source_;
  const int64_t max_tokens_, vocab_size_;
  std::vector<Sequence*> listed_;
};

}  // namespace fp4moe
