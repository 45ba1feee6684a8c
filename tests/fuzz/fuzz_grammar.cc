// Any bytes as a grammar of any kind and as the tokens drawn from it: compilation, masks and tokens stay
// within their budgets and end with a result or a client error, and every token that a mask allows is
// accepted.
//   input: a byte for the kind, the grammar's text up to a zero byte, a byte for each token
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "engine/grammar/grammar.h"
#include "io/tokenizer/bpe.h"
#include "io/tokenizer/tokenizer.h"

namespace {

using fp4moe::GrammarSpec;
using fp4moe::Status;
using fp4moe::StatusCode;
using fp4moe::Tokenizer;

constexpr int32_t kEosId = 256;
constexpr int64_t kVocab = 288;
constexpr fp4moe::GrammarBudget kCompile{.max_steps = 10'000'000, .max_bytes = 128 << 20};
constexpr size_t kMaxTokens = 32;
constexpr fp4moe::GrammarBudget kToken{.max_steps = 300'000, .max_bytes = 32 << 20};

// Every byte, an end token, and words that grammars often contain.
Tokenizer make_tokenizer() {
  std::string vocab;
  int32_t id = 0;
  const auto add = [&](const std::string& token) {
    const bool is_escaped = token == "\"" || token == "\\";
    vocab +=
        (id == 0 ? "\"" : ",\"") + std::string(is_escaped ? "\\" : "") + token + "\":" + std::to_string(id++);
  };
  for (int byte = 0; byte < 256; ++byte) add(fp4moe::byte_level_of(static_cast<uint8_t>(byte)));
  add("<eos>");
  for (const char* word : {"aa", "ab", "aaaa", "aaaaaaaaaaaaaaaa", "},", "}}", "[[", "true", "12"}) add(word);
  auto tokenizer = Tokenizer::parse(
      R"({"added_tokens":[{"id":256,"content":"<eos>","single_word":false,"lstrip":false,"rstrip":false,)"
      R"("normalized":false,"special":true}],"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,)"
      R"("use_regex":false},"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","vocab":{)" +
      vocab + R"(},"merges":[]}})");
  FP4MOE_CHECK(tokenizer.ok(), tokenizer.status().to_string());
  return std::move(*tokenizer);
}

// Checks that the error is a client error: no other error is allowed.
void check_error(const Status& status) {
  FP4MOE_CHECK(status.code() == StatusCode::kInvalidArgument, status.to_string());
  FP4MOE_CHECK(!status.message().empty(), "no message");
}

bool is_allowed(const std::vector<uint32_t>& allowed, int32_t id) {
  return (allowed[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0;
}

// Returns the first allowed id at or cyclically after `wanted`, or -1 if no id is allowed.
int32_t choose(const std::vector<uint32_t>& allowed, int32_t wanted) {
  for (int32_t i = 0; i < kVocab; ++i)
    if (const auto id = static_cast<int32_t>((wanted + i) % kVocab); is_allowed(allowed, id)) return id;
  return -1;
}

void decode(const fp4moe::Grammar& grammar, std::string_view draws) {
  const auto matcher = grammar.make_matcher();
  std::vector<uint32_t> allowed((kVocab + 31) / 32);
  for (const char draw : draws.substr(0, kMaxTokens)) {
    if (matcher->has_ended()) return;
    if (const Status mask = matcher->fill_allowed(allowed, kToken); !mask.ok()) return check_error(mask);
    const int32_t wanted = static_cast<unsigned char>(draw);
    if (wanted % 64 == 63 && !is_allowed(allowed, wanted)) {
      FP4MOE_CHECK(!matcher->accept(wanted, kToken).ok(), "a token that the mask forbids was accepted");
      return;
    }
    const int32_t id = choose(allowed, wanted);
    FP4MOE_CHECK(id >= 0, "a mask without a token");
    if (const Status accepted = matcher->accept(id, kToken); !accepted.ok()) return check_error(accepted);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Tokenizer tokenizer = make_tokenizer();
  static const auto compiler = fp4moe::make_grammar_compiler(tokenizer, kVocab, {kEosId});
  FP4MOE_CHECK(compiler != nullptr, "this build has no xgrammar");
  if (size == 0) return 0;
  constexpr GrammarSpec::Kind kKinds[] = {GrammarSpec::Kind::kJsonSchema, GrammarSpec::Kind::kRegex,
                                          GrammarSpec::Kind::kEbnf, GrammarSpec::Kind::kStructuralTag};
  const std::string_view input(reinterpret_cast<const char*>(data) + 1, size - 1);
  const size_t end = std::min(input.find('\0'), input.size());
  const auto grammar = compiler->compile({kKinds[data[0] % 4], std::string(input.substr(0, end))}, kCompile);
  if (!grammar.ok())
    check_error(grammar.status());
  else
    decode(**grammar, input.substr(std::min(end + 1, input.size())));
  return 0;
}
