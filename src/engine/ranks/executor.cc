#include "engine/ranks/executor.h"

#include <cmath>

namespace fp4moe {
namespace {

int32_t most_probable(std::span<const float> logits) {
  size_t best = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!std::isfinite(logits[i])) return -1;
    if (logits[i] > logits[best]) best = i;
  }
  return static_cast<int32_t>(best);
}

}  // namespace

Status Executor::take_draft_ids(int32_t /*first*/, std::span<int32_t> ids) {
  const int64_t vocab_size = draft_shape().vocab_size;
  const float* const rows = logits();
  pool().run(std::ssize(ids), [&](int64_t i, int) {
    const int32_t id = most_probable({rows + i * vocab_size, static_cast<size_t>(vocab_size)});
    ids[static_cast<size_t>(i)] = target_id(id, draft_token_ids(), config().vocab_size);
  });
  return {};
}

}  // namespace fp4moe
