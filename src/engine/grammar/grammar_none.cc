// Replaces grammar_xgrammar.cc in builds without xgrammar.
#include "engine/grammar/grammar.h"

namespace fp4moe {

bool has_grammar_backend() { return false; }

std::unique_ptr<GrammarCompiler> make_grammar_compiler(const Tokenizer&, int64_t, std::vector<int32_t>) {
  return nullptr;
}

}  // namespace fp4moe
