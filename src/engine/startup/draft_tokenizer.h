// Checks that a draft model's token ids mean what the target's do.
#pragma once

#include <string>

#include "fp4moe/status.h"
#include "io/tokenizer/tokenizer.h"

namespace fp4moe {

// Compares the tokens of all ids: their bytes, and whether they are special. kUnsupported names the first id
// that differs, with both tokens.
Status check_draft_tokenizer(const Tokenizer& target, const Tokenizer& draft);

}  // namespace fp4moe
