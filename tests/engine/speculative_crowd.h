// A crowd of requests to an engine on a demo checkpoint, for comparisons of outputs with and without drafts.
// Sources that include this header need the definition FP4MOE_MODELS.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/demo_engine.h"
#include "engine/grammar/grammar.h"

namespace fp4moe {

struct Output {
  std::string text;
  std::vector<int32_t> token_ids;
  std::vector<float> logprobs;  // of each token: its own, then those of the listed ids
  std::vector<int32_t> experts;
  bool operator==(const Output&) const = default;
};

inline std::future<Output> submit(Engine& engine, Request request) {
  struct State {
    Output output;
    std::promise<Output> done;
  };
  const auto state = std::make_shared<State>();
  auto output = state->done.get_future();
  const auto id = engine.submit(std::move(request), [state](const Delta& delta) {
    Output& out = state->output;
    out.text += delta.text;
    out.token_ids.insert(out.token_ids.end(), delta.token_ids.begin(), delta.token_ids.end());
    for (const PositionLogprobs& position : delta.logprobs) {
      out.logprobs.push_back(position.chosen.logprob);
      for (const TokenLogprob& listed : position.top) out.logprobs.push_back(listed.logprob);
    }
    if (delta.finish_reason == FinishReason::kNone) return;
    EXPECT_NE(delta.finish_reason, FinishReason::kError) << delta.error;
    if (delta.routed_experts != nullptr) out.experts = *delta.routed_experts;
    state->done.set_value(out);
  });
  EXPECT_TRUE(id.ok()) << id.status().to_string();
  return output;
}

// A third of the requests is greedy, some have a grammar and some report experts. The prompts repeat
// themselves, and so do many outputs.
inline std::vector<Request> requests(const Engine& engine) {
  std::mt19937 random(7);
  const Result<std::vector<int32_t>> words = engine.tokenize(
      "Question: Tom has 3 apples and buys 4 apples. How many apples does Tom have? Answer:", false);
  EXPECT_TRUE(words.ok());
  std::vector<Request> list;
  for (uint64_t i = 0; i < 32; ++i) {
    Request request;
    for (uint64_t copy = 0; copy <= i % 3; ++copy)
      request.input_ids.insert(request.input_ids.end(), words->begin(),
                               words->end() - static_cast<std::ptrdiff_t>(random() % 5));
    constexpr float kTemperatures[] = {0, 0.7f, 1};
    request.sampling = {.temperature = kTemperatures[i % 3],
                        .seed = i,
                        .max_new_tokens = static_cast<int64_t>(40 + random() % 40),
                        .ignore_eos = true,
                        .top_logprobs = 3};
    if (i % 5 == 4) request.sampling.frequency_penalty = 0.5f;
    if (i % 4 == 3) request.routed_experts_from = 0;
    if (i % 6 == 1 && has_grammar_backend())
      request.sampling.grammar = {GrammarSpec::Kind::kRegex, "(Tom has [0-9]{1,2} apples?[.,] ){1,12}"};
    list.push_back(std::move(request));
  }
  return list;
}

struct Crowd {
  std::vector<Output> outputs;
  EngineStats stats;
};

inline Crowd run_crowd(const EngineConfig& config) {
  Crowd run;
  const auto engine = make_engine(config);
  if (engine == nullptr) return run;
  std::vector<std::future<Output>> crowd;
  {
    const Hold hold(*engine);
    for (Request& request : requests(*engine)) crowd.push_back(submit(*engine, std::move(request)));
  }
  for (auto& output : crowd) run.outputs.push_back(output.get());
  engine->drain(60);
  run.stats = engine->stats();
  EXPECT_EQ(run.stats.num_used_tokens, 0);
  EXPECT_EQ(run.stats.num_leaked_pages, 0);
  return run;
}

inline EngineConfig with_ngrams(EngineConfig config) {
  config.speculative_algorithm = "NGRAM";
  config.speculative_num_draft_tokens = 6;
  config.speculative_ngram_min_match_window_size = 1;
  return config;
}

// The prompts of the crowd's requests, each with its output.
inline std::vector<std::vector<int32_t>> whole_texts(const EngineConfig& config, const Crowd& plain) {
  std::vector<std::vector<int32_t>> whole;
  const auto engine = make_engine(config);
  if (engine == nullptr) return whole;
  for (const Request& request : requests(*engine)) {
    whole.push_back(request.input_ids);
    const std::vector<int32_t>& output = plain.outputs[whole.size() - 1].token_ids;
    whole.back().insert(whole.back().end(), output.begin(), output.end());
  }
  return whole;
}

// Proposes draft(id, i) for each of the tokens that follow in the first of the texts that begins with the
// sequence; `id` is the text's token i.
template <class Draft>
DraftSource drafts_of(std::vector<std::vector<int32_t>> whole, Draft draft) {
  return [whole = std::move(whole), draft](std::span<const int32_t> ids, int64_t max_tokens) {
    std::vector<int32_t> drafts;
    const auto has_begun = [&](const std::vector<int32_t>& text) {
      return text.size() >= ids.size() && std::equal(ids.begin(), ids.end(), text.begin());
    };
    const auto text = std::find_if(whole.begin(), whole.end(), has_begun);
    if (text == whole.end()) return drafts;
    const size_t end = ids.size() + static_cast<size_t>(max_tokens) + 4;  // more than may be proposed
    for (size_t i = ids.size(); i < std::min(end, text->size()); ++i) drafts.push_back(draft((*text)[i], i));
    return drafts;
  };
}

// How many of the drafts are right, which decides which of them a model with states replays.
enum class DraftKind { kWrong, kMixed, kRight };

inline DraftSource drafts_of_kind(const std::vector<std::vector<int32_t>>& whole, DraftKind kind) {
  return drafts_of(whole, [kind](int32_t id, size_t i) {
    const bool is_right = kind == DraftKind::kRight || (kind == DraftKind::kMixed && i * i % 7 != 2);
    return is_right ? id : (id + 1) % 259;
  });
}

// More than `correct` of the drafts are right.
inline void expect_plain(const Crowd& drafted, const Crowd& plain, const std::string& what,
                         int64_t correct = 100) {
  ASSERT_EQ(plain.outputs.size(), 32u);
  ASSERT_EQ(drafted.outputs.size(), 32u);
  for (size_t i = 0; i < plain.outputs.size(); ++i)
    EXPECT_EQ(drafted.outputs[i], plain.outputs[i]) << "request " << i << " " << what;
  EXPECT_EQ(plain.stats.spec_verify_calls_total, 0);
  EXPECT_GT(drafted.stats.spec_correct_drafts_total, correct) << what;
  EXPECT_GT(drafted.stats.spec_proposed_drafts_total, drafted.stats.spec_correct_drafts_total) << what;
}

}  // namespace fp4moe
