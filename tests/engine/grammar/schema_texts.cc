// Draws random texts that JSON schemas allow. stdin: one schema a line. stdout: for each, the line
// {"error": MESSAGE} or {"texts": [TEXT, ...]} with a code point for each byte of a text; a text that does
// not end within 2000 tokens is omitted.
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "engine/fake_tokenizer.h"
#include "engine/grammar/grammar.h"

namespace fp4moe {
namespace {

constexpr int64_t kVocab = 300;
constexpr int kTexts = 40, kMaxTokens = 2000, kEagerTokens = 150;

std::string latin1(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x80) text += static_cast<char>(0xc0 | byte >> 6);
    text += static_cast<char>(byte >= 0x80 ? 0x80 | (byte & 0x3f) : byte);
  }
  return text;
}

// Prefers tokens that end a string, a list or an object, always after kEagerTokens.
std::string random_text(const Grammar& grammar, const Tokenizer& tokenizer, uint32_t seed) {
  std::mt19937 random(seed);
  const auto matcher = grammar.make_matcher();
  std::vector<uint32_t> allowed((kVocab + 31) / 32);
  std::string text;
  for (int step = 0; step < kMaxTokens; ++step) {
    if (!matcher->fill_allowed(allowed, kMaskBudget).ok()) return "a mask failed";
    std::vector<int32_t> ids, closing;
    for (int32_t id = 0; id < kVocab; ++id)
      if ((allowed[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0) {
        ids.push_back(id);
        if (id == kEosId || id == '"' || id == ']' || id == '}') closing.push_back(id);
      }
    if (ids.empty()) return "a dead end after " + text;
    if (!closing.empty() && (step > kEagerTokens || random() % 8 == 0)) ids = closing;
    const int32_t id = ids[random() % ids.size()];
    if (!matcher->accept(id, kAcceptBudget).ok()) return "a refused token after " + text;
    if (id == kEosId) return text;
    text += tokenizer.token_bytes(id);
  }
  return "";
}

int draw() {
  const Tokenizer tokenizer = fake_tokenizer({"<a>", "ab"});
  const auto compiler = make_grammar_compiler(tokenizer, kVocab, {kEosId});
  if (compiler == nullptr) return 77;
  for (std::string line; std::getline(std::cin, line);) {
    nlohmann::json result;
    const auto grammar = compiler->compile({GrammarSpec::Kind::kJsonSchema, line}, kCompileBudget);
    if (!grammar.ok()) {
      result["error"] = grammar.status().message();
    } else {
      result["texts"] = nlohmann::json::array();
      for (uint32_t seed = 0; seed < kTexts; ++seed) {
        const std::string text = random_text(**grammar, tokenizer, seed);
        if (!text.empty()) result["texts"].push_back(latin1(text));
      }
    }
    std::cout << result.dump(-1, ' ', true) << "\n";
  }
  return 0;
}

}  // namespace
}  // namespace fp4moe

int main() { return fp4moe::draw(); }
