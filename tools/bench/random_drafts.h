// RandomDrafts: drafts for bench latency's synthetic acceptance, without a drafter.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "fp4moe/engine.h"
#include "fp4moe/sinks.h"

namespace fp4moe {

// Drafts for --speculative-synthetic-acceptance without a drafter: random ids that have a token, because an
// id without one is never kept. Must outlive the engine that drafts from it.
class RandomDrafts {
 public:
  // Called before the engine has requests.
  void set_engine(const Engine& engine) {
    ids_.clear();
    for (int32_t id = 0; id < engine.info().vocab_size; ++id)
      if (const auto text = engine.detokenize({id}, /*skip_special_tokens=*/false);
          text.ok() && !text->empty())
        ids_.push_back(id);
  }
  DraftSource source() {
    return [this](std::span<const int32_t>, int64_t max_tokens) {
      std::vector<int32_t> drafts(ids_.empty() ? 0 : static_cast<size_t>(max_tokens));
      for (int32_t& id : drafts) id = ids_[random_() % ids_.size()];
      return drafts;
    };
  }

 private:
  std::vector<int32_t> ids_;
  std::mt19937_64 random_{1};
};

}  // namespace fp4moe
