// The host cost of a grammar in a decode step: computing the mask of one row and applying it to the row's
// logits, for a vocabulary of gpt-oss's size. Compare with the step time of `bench latency`.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <unordered_set>
#include <vector>

#include "engine/grammar/grammar.h"
#include "engine/output/sampler.h"

namespace fp4moe {
namespace {

constexpr int64_t kVocab = 201088;  // gpt-oss-20b's
constexpr int32_t kEosId = kVocab - 1;

// Bytes, then words, numbers and punctuation with lengths and frequencies like those of trained vocabularies.
std::vector<std::string> make_words() {
  std::mt19937 random(1);
  std::vector<std::string> words;
  std::unordered_set<std::string> seen;
  for (char c = '!'; c <= '~'; ++c) words.emplace_back(1, c);
  words.emplace_back("\xC4\xA0");  // a space
  seen.insert(words.begin(), words.end());
  const std::string punctuation = "{}[]:,.()=-_/<>#*'";
  while (std::ssize(words) < kVocab - 1) {
    std::string word;
    const uint32_t kind = random() % 20;
    const size_t length = kind == 0 ? 1 + random() % 4 : kind == 1 ? 2 + random() % 2 : 2 + random() % 9;
    for (size_t i = 0; i < length; ++i)
      word += kind == 0   ? punctuation[random() % punctuation.size()]
              : kind == 1 ? static_cast<char>('0' + random() % 10)
                          : static_cast<char>('a' + random() % 26);
    if (kind > 10) word = "\xC4\xA0" + word;  // a space in front, as byte-level vocabularies write it
    if (seen.insert(word).second) words.push_back(word);
  }
  return words;
}

Tokenizer make_tokenizer() {
  std::string vocab;
  int32_t id = 0;
  for (const std::string& word : make_words()) {
    std::string escaped;
    for (const char c : word) escaped += (c == '"' || c == '\\' ? "\\" : "") + std::string(1, c);
    vocab += "\"" + escaped + "\":" + std::to_string(id++) + ",";
  }
  vocab += "\"<eos>\":" + std::to_string(kEosId);
  const std::string byte_level =
      R"({"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true})";
  auto tokenizer = Tokenizer::parse(
      R"({"version":"1.0","truncation":null,"padding":null,"normalizer":null,"post_processor":null,)"
      R"("added_tokens":[{"id":)" +
      std::to_string(kEosId) +
      R"(,"content":"<eos>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],)"
      R"("pre_tokenizer":)" +
      byte_level + R"(,"decoder":)" + byte_level +
      R"(,"model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,)"
      R"("end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,"vocab":{)" +
      vocab + R"(},"merges":[]}})");
  if (!tokenizer.ok()) {
    std::fprintf(stderr, "%s\n", tokenizer.status().message().c_str());
    std::exit(1);
  }
  return std::move(*tokenizer);
}

struct Case {
  GrammarSpec::Kind kind;
  const char* text;
};
constexpr Case kCases[] = {
    {GrammarSpec::Kind::kJsonSchema, R"({"type":"object"})"},
    {GrammarSpec::Kind::kJsonSchema,
     R"({"type":"object","properties":{"name":{"type":"string","maxLength":40},"age":{"type":"integer","minimum":0,)"
     R"("maximum":120},"tags":{"type":"array","items":{"type":"string","maxLength":16},"maxItems":5},"score":)"
     R"({"type":"number","minimum":0,"maximum":1}},"required":["name","age","tags","score"]})"},
    {GrammarSpec::Kind::kJsonSchema,
     R"({"type":"object","properties":{"text":{"type":"string"},"kind":{"enum":["a","b","c"]}},"required":["text","kind"]})"},
    {GrammarSpec::Kind::kRegex, "([A-Za-z ]{1,60}[.!?] ){1,5}"},
};

const Tokenizer& tokenizer() {
  static const Tokenizer tokenizer = make_tokenizer();
  return tokenizer;
}

GrammarCompiler* compiler() {
  static const auto compiler = make_grammar_compiler(tokenizer(), kVocab, {kEosId});
  return compiler.get();
}

// Also reports the budget steps of a compilation.
void compile(benchmark::State& state) {
  if (compiler() == nullptr) return state.SkipWithError("this build has no xgrammar");
  const Case& c = kCases[state.range(0)];
  for (auto _ : state) {
    const auto grammar = compiler()->compile({c.kind, c.text}, kCompileBudget);
    if (!grammar.ok()) return state.SkipWithError(grammar.status().message().c_str());
    state.counters["steps"] = static_cast<double>((*grammar)->num_steps());
  }
}
BENCHMARK(compile)->DenseRange(0, 3)->ArgName("case")->Unit(benchmark::kMillisecond);

// Every iteration is one step of a random walk through the grammar; a walk that ends starts again.
void mask_row(benchmark::State& state) {
  if (compiler() == nullptr) return state.SkipWithError("this build has no xgrammar");
  const Case& c = kCases[state.range(0)];
  const auto grammar = compiler()->compile({c.kind, c.text}, kCompileBudget);
  if (!grammar.ok()) return state.SkipWithError(grammar.status().message().c_str());
  const Sampler sampler(kVocab, {});
  const SamplingParams greedy{.temperature = 0};
  std::mt19937 random(1);
  std::vector<uint32_t> allowed(kVocab / 32);
  std::vector<float> noise(kVocab), logits(kVocab);
  for (float& x : noise) x = static_cast<float>(random() % 1000) * 0.01f;
  auto matcher = (*grammar)->make_matcher();
  for (auto _ : state) {
    state.PauseTiming();
    const size_t turn = random() % noise.size();
    std::rotate_copy(noise.begin(), noise.begin() + static_cast<std::ptrdiff_t>(turn), noise.end(),
                     logits.begin());
    state.ResumeTiming();
    if (state.range(1) != 0 && !matcher->fill_allowed(allowed, kMaskBudget).ok())
      return state.SkipWithError("no mask");
    const std::span<const uint32_t> mask(allowed.data(), state.range(1) != 0 ? allowed.size() : 0);
    const auto token = sampler.sample(logits, greedy, 0, {}, mask);
    if (state.range(1) == 0) continue;
    if (!token.ok() || !matcher->accept(token->token_id, kAcceptBudget).ok())
      return state.SkipWithError("no token");
    if (matcher->has_ended()) matcher = (*grammar)->make_matcher();
  }
}
// grammar = 0 samples the same row without a grammar.
BENCHMARK(mask_row)
    ->ArgsProduct({{0, 1, 2, 3}, {0, 1}})
    ->ArgNames({"case", "grammar"})
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace fp4moe

BENCHMARK_MAIN();
