#include "engine/startup/draft_tokenizer.h"

#include <algorithm>

#include "base/printable.h"

namespace fp4moe {
namespace {

std::string token_text(const Tokenizer& tokenizer, int32_t id) {
  if (!tokenizer.has_token(id)) return "no token";
  return std::string(tokenizer.is_special(id) ? "the special token '" : "'") +
         printable(tokenizer.token_bytes(id)) + "'";
}

}  // namespace

Status check_draft_tokenizer(const Tokenizer& target, const Tokenizer& draft) {
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

}  // namespace fp4moe
