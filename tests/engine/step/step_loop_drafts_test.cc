// The step loop with draft tokens: every output equals that of the same loop without them.
#include <gtest/gtest.h>

#include <random>

#include "engine/crowd_shape.h"
#include "engine/fake_grammar.h"
#include "engine/test_loop.h"

namespace fp4moe {
namespace {

constexpr NgramLimits kDrafts{.max_tokens = 3, .min_match = 1, .max_match = 4};

// The parameter: whether the executor samples.
class StepLoopDrafts : public testing::TestWithParam<bool> {
 protected:
  static LoopShape with_drafts(LoopShape shape = {}) {
    shape.drafts = kDrafts;
    shape.samples = GetParam();
    return shape;
  }
};
INSTANTIATE_TEST_SUITE_P(Sampling, StepLoopDrafts, testing::Bool(),
                         [](const auto& p) { return p.param ? "on_the_executor" : "on_the_host"; });

// A model that mostly continues a short cycle, but chooses another token after one of five histories. The
// whole history counts, so that a wrong key or value anywhere changes the output.
void nearly_periodic_logits(std::span<const int32_t> history, std::span<float> logits) {
  hashed_logits(history, logits);
  const auto hash = static_cast<int32_t>((logits[7] + 4) * 1000);
  for (float& x : logits) x /= 4;
  const int32_t next = hash % 5 == 0 ? hash % 11 : history.back() % 3 + 1;
  logits[static_cast<size_t>(next)] += 7;
}

void expect_equal(const Answer& drafted, const Answer& plain, const std::string& what) {
  EXPECT_EQ(drafted.text, plain.text) << what;
  EXPECT_EQ(drafted.token_ids, plain.token_ids) << what;
  EXPECT_EQ(drafted.reason(), plain.reason()) << what;
  EXPECT_EQ(drafted.last.matched_stop, plain.last.matched_stop) << what;
  EXPECT_EQ(drafted.last.matched_stop_token, plain.last.matched_stop_token) << what;
  EXPECT_EQ(drafted.last.completion_tokens, plain.last.completion_tokens) << what;
  ASSERT_EQ(drafted.last.routed_experts == nullptr, plain.last.routed_experts == nullptr) << what;
  if (plain.last.routed_experts != nullptr) {
    EXPECT_EQ(*drafted.last.routed_experts, *plain.last.routed_experts) << what;
  }
  const auto equal_tokens = [](const TokenLogprob& a, const TokenLogprob& b) {
    return a.token_id == b.token_id && a.logprob == b.logprob && a.bytes == b.bytes;
  };
  ASSERT_EQ(drafted.logprobs.size(), plain.logprobs.size()) << what;
  for (size_t i = 0; i < plain.logprobs.size(); ++i) {
    EXPECT_TRUE(equal_tokens(drafted.logprobs[i].chosen, plain.logprobs[i].chosen)) << what << " token " << i;
    EXPECT_TRUE(std::ranges::equal(drafted.logprobs[i].top, plain.logprobs[i].top, equal_tokens)) << what;
    EXPECT_TRUE(std::ranges::equal(drafted.logprobs[i].ids, plain.logprobs[i].ids, equal_tokens)) << what;
  }
}

TEST_P(StepLoopDrafts, AllDraftsOfACycleAreKept) {
  TestLoop loop(certain_logits([](auto history) { return history.back() % 3 + 1; }), with_drafts());
  const Answer answer = loop.run({1, 2, 3, 1}, greedy(41));
  EXPECT_EQ(answer.token_ids.size(), 41u);
  for (size_t i = 0; i < answer.token_ids.size(); ++i)
    EXPECT_EQ(answer.token_ids[i], static_cast<int32_t>(i + 1) % 3 + 1);
  EXPECT_EQ(answer.last.spec_verify_ct, 10) << "the first token, then 4 in each step";
  EXPECT_EQ(answer.last.spec_num_proposed_drafts, 30);
  EXPECT_EQ(answer.last.spec_num_correct_drafts, 30);
  const EngineStats stats = loop.finish();
  EXPECT_EQ(stats.spec_verify_calls_total, 10);
  EXPECT_EQ(stats.spec_correct_drafts_total, 30);
  EXPECT_EQ(stats.generation_tokens_total, 41);
}

// The last token of an output needs no row, and a draft beyond it none either.
TEST_P(StepLoopDrafts, NoRowIsBeyondTheOutput) {
  TestLoop loop(certain_logits([](auto history) { return history.back() % 3 + 1; }), with_drafts());
  int64_t end = 0;  // after the last row's position
  loop.executor().on_step = [&](std::span<const Batch> groups) {
    for (const int64_t position : groups[0].positions) end = std::max(end, position + 1);
  };
  for (int64_t most = 1; most <= 12; ++most) {
    end = 0;
    EXPECT_EQ(loop.run({1, 2, 3, 1}, greedy(most)).last.completion_tokens, most);
    EXPECT_EQ(end, 4 + most - 1);
  }
  loop.finish();
}

// The output alternates between one token and ever new ones, so what followed it before is always wrong.
TEST_P(StepLoopDrafts, WrongDraftsAreDropped) {
  std::vector<int32_t> said;
  for (int32_t i = 0; i < 40; ++i) said.insert(said.end(), {7, 20 + i});
  TestLoop loop(says(said), with_drafts());
  const Answer answer = loop.run({9}, greedy(80));
  EXPECT_EQ(answer.token_ids, said);
  EXPECT_EQ(answer.last.spec_num_correct_drafts, 0);
  EXPECT_GT(answer.last.spec_num_proposed_drafts, 100);
  EXPECT_EQ(answer.last.spec_verify_ct, 79);
  loop.finish();
}

TEST_P(StepLoopDrafts, OutputsEndInsideADraft) {
  const FakeLogits logits = says("abcabcabcabcabcabcabcabcabc");
  TestLoop plain(logits), drafted(logits, with_drafts());
  int64_t num_correct = 0;
  for (int64_t most = 1; most <= 28; ++most)
    for (const std::string stop : {"", "ca", "cabcab", "bcabcabcab", "x"}) {
      SamplingParams sampling = greedy(most);
      if (!stop.empty()) sampling.stop = {stop};
      sampling.min_new_tokens = most / 2;
      const Answer answer = drafted.run({65}, sampling);
      expect_equal(answer, plain.run({65}, sampling), stop + " " + std::to_string(most));
      EXPECT_LE(answer.last.completion_tokens, most);
      num_correct += answer.last.spec_num_correct_drafts;
    }
  for (const std::string expression : {"c[a-c]{5}a", "(bca)+b"}) {
    SamplingParams sampling = greedy(26);
    sampling.stop_regex = {expression};
    expect_equal(drafted.run({65}, sampling), plain.run({65}, sampling), expression);
    sampling.stop_regex.clear();
    sampling.stop_token_ids = {'c'};
    sampling.min_new_tokens = 11;
    expect_equal(drafted.run({65}, sampling), plain.run({65}, sampling), "stop token");
  }
  EXPECT_GT(num_correct, 500);
  drafted.finish();
}

// Only a row that the output reaches can fail a request.
TEST_P(StepLoopDrafts, BadLogitsCountOnlyWhereTheyAreReached) {
  for (const bool is_reached : {false, true}) {
    TestLoop loop(
        [&](std::span<const int32_t> history, std::span<float> logits) {
          certain_logits([](auto h) { return h.size() == 9 ? 5 : h.back() % 3 + 1; })(history, logits);
          const bool is_draft = history.size() == 11 && history[9] != 5;
          if (is_reached ? history.size() == 12 : is_draft) logits[3] = std::nanf("");
        },
        with_drafts());
    const Answer answer = loop.run({1, 2, 3, 1}, greedy(20));
    EXPECT_EQ(answer.reason(), is_reached ? FinishReason::kError : FinishReason::kLength);
    EXPECT_EQ(answer.token_ids.size(), is_reached ? 8u : 20u);
    EXPECT_GT(answer.last.spec_num_correct_drafts, 0);
    loop.finish();
  }
}

// The text of the grammar repeats itself, so drafts reach its end and the end token.
TEST_P(StepLoopDrafts, AGrammarIsAdvancedByTheKeptDraftsOnly) {
  LoopShape shape = with_drafts();
  const auto open = std::make_shared<std::atomic<bool>>(true);
  shape.grammars = [open] { return std::make_unique<OneTextCompiler>(open); };
  TestLoop loop(hashed_logits, shape);
  int64_t num_correct = 0;
  for (const std::string text :
       {"abababababababab", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "abcabcabdabcabdabcabcabce", "ab", "a"})
    for (const int64_t most : {1, 2, 7, 15, 16, 17, 60}) {
      SamplingParams sampling = greedy(most);
      sampling.grammar = {GrammarSpec::Kind::kRegex, text};
      const Answer answer = loop.run({'a', 'b', 'a', 'b', kEosId}, sampling);
      EXPECT_EQ(answer.text, text.substr(0, static_cast<size_t>(most)));
      EXPECT_EQ(answer.reason(), most <= std::ssize(text) ? FinishReason::kLength : FinishReason::kStop);
      num_correct += answer.last.spec_num_correct_drafts;
    }
  EXPECT_GT(num_correct, 100);
  loop.finish();
}

// Masks that take longer than a step waits lead to fewer drafts, masks over the fast lane's budget to none.
TEST_P(StepLoopDrafts, LateMasksLeadToFewerDrafts) {
  SamplingParams sampling = greedy(40);
  sampling.grammar = {GrammarSpec::Kind::kRegex, "hashed"};
  const auto run = [&](const FakeCosts& costs, const NgramLimits& drafts, EngineStats& stats) {
    LoopShape shape{.samples = GetParam()};
    shape.drafts = drafts;
    shape.grammars = [&] { return std::make_unique<CostlyCompiler>(costs); };
    TestLoop loop(nearly_periodic_logits, shape);
    std::vector<Answer> answers;
    for (int32_t i = 0; i < 6; ++i) answers.push_back(loop.run({'!', i, '!', '!'}, sampling));
    stats = loop.finish();
    return answers;
  };
  const FakeCosts cheap = [](const std::string&, int64_t, bool) { return FakeCost(); };
  EngineStats stats;
  const std::vector<Answer> plain = run(cheap, {}, stats);
  struct Case {
    const char* name;
    FakeCosts costs;
  };
  for (const Case& one :
       {Case{"cheap", cheap},
        {"late",
         [](const std::string&, int64_t n, bool is_mask) {
           return FakeCost{.time = std::chrono::milliseconds(is_mask && n % 3 == 0 ? 4 : 0)};
         }},
        {"over the budget",
         [](const std::string&, int64_t n, bool) { return FakeCost{.steps = n % 20 == 7 ? 5'000'000 : 1}; }},
        {"slow", [](const std::string&, int64_t, bool) { return FakeCost{.steps = 5'000'000}; }}}) {
    const std::vector<Answer> drafted = run(one.costs, kDrafts, stats);
    for (size_t i = 0; i < plain.size(); ++i) expect_equal(drafted[i], plain[i], one.name);
    if (std::string(one.name) == "slow")
      EXPECT_EQ(stats.spec_proposed_drafts_total, 0);
    else
      EXPECT_GT(stats.spec_proposed_drafts_total, 0) << one.name;
  }
}

// Each kept token's experts are recorded once, and no others.
TEST_P(StepLoopDrafts, RoutedExpertsAreThoseOfTheKeptTokens) {
  LoopShape shape = with_drafts();
  TestLoop loop(nearly_periodic_logits, shape), plain(nearly_periodic_logits);
  for (const int64_t from : {0, 1, 3, 4})
    for (const std::string& stop : {std::string(), std::string{3, 1}}) {
      Request request{"", {1, 2, 3, 1}, greedy(60)};
      request.routed_experts_from = from;
      if (!stop.empty()) request.sampling.stop = {stop};
      const Answer drafted = loop.run(request), expected = plain.run(request);
      expect_equal(drafted, expected, "from " + std::to_string(from));
      ASSERT_NE(drafted.last.routed_experts, nullptr);
      EXPECT_EQ(*drafted.last.routed_experts, *expected.last.routed_experts) << "from " << from;
      EXPECT_GT(drafted.last.spec_num_correct_drafts, 0);
    }
  loop.finish();
}

// Every step is sampled before the next one is planned, whose rows depend on the tokens.
TEST_P(StepLoopDrafts, NoStepIsAheadOfTheTokens) {
  TestLoop loop(nearly_periodic_logits, with_drafts());
  loop.executor().on_step = [](std::span<const Batch> groups) {
    for (const int32_t id : groups[0].token_ids) EXPECT_GE(id, 0) << "a token that is not known yet";
  };
  const Answer answer = loop.run({1, 2}, greedy(60));
  EXPECT_EQ(answer.token_ids.size(), 60u);
  EXPECT_GT(answer.last.spec_num_correct_drafts, 0);
  loop.finish();
}

TEST_P(StepLoopDrafts, AnExecutorThatFailsToSampleEndsTheRequests) {
  TestLoop loop(nearly_periodic_logits, with_drafts());
  loop.executor().sample_failure = internal_error("no tokens");
  const Answer answer = loop.run({1, 2}, greedy(60));
  EXPECT_EQ(answer.reason(), GetParam() ? FinishReason::kError : FinishReason::kLength);
  EXPECT_EQ(answer.last.error, GetParam() ? "no tokens" : "");
  loop.finish();
}

// ---- crowds ---------------------------------------------------------------------------------------

class Crowd {
 public:
  explicit Crowd(int round) : random_(static_cast<uint32_t>(round)) {
    shape_ = crowd_shape(round, /*max_spare_pages=*/12, random_);
    shape_.grammars = [] { return std::make_unique<CostlyCompiler>([](auto&&...) { return FakeCost(); }); };
    for (int i = 0; i < 12; ++i) requests_.push_back(request());
  }

  // Some requests have a twin that is cancelled at its third token.
  std::vector<Answer> run(const NgramLimits& drafts, bool samples, EngineStats& stats) {
    shape_.drafts = drafts;
    shape_.samples = samples;
    TestLoop loop(nearly_periodic_logits, shape_);
    loop.executor().on_step = [&](std::span<const Batch> groups) { check_sizes(groups, drafts); };
    std::vector<Collector> collectors(requests_.size()), twins(requests_.size());
    for (size_t i = 0; i < requests_.size(); ++i) {
      EXPECT_TRUE(loop->submit(requests_[i], collectors[i].callback()).ok());
      if (i % 3 != 0) continue;
      Request twin = requests_[i];
      twin.id = "twin " + std::to_string(i);
      const auto cancel = [&, id = twin.id, collect = twins[i].callback()](const Delta& delta) {
        if (delta.completion_tokens == 3) loop->cancel(id);
        collect(delta);
      };
      EXPECT_TRUE(loop->submit(twin, cancel).ok());
    }
    std::vector<Answer> answers;
    for (Collector& collector : collectors) answers.push_back(collector.wait());
    stats = loop.finish();
    return answers;
  }

 private:
  int below(int n) { return fp4moe::below(random_, n); }

  Request request() {
    Request request;
    for (int n = 1 + below(30); n > 0; --n) request.input_ids.push_back(1 + below(3));
    SamplingParams& sampling = request.sampling;
    sampling.temperature = below(2) == 0 ? 0 : 1;
    sampling.seed = below(1000);
    sampling.max_new_tokens = 1 + below(60);
    sampling.min_new_tokens = below(2) * below(static_cast<int>(sampling.max_new_tokens));
    sampling.ignore_eos = below(2) == 0;
    sampling.top_logprobs = below(3) - 1;
    if (sampling.top_logprobs >= 0) sampling.token_ids_logprob = {below(9), 2};
    if (below(3) == 0) sampling.frequency_penalty = 0.125f * static_cast<float>(1 + below(6));
    if (below(3) == 0) sampling.repetition_penalty = 1.25f;
    if (below(4) == 0) sampling.top_p = 0.9f;
    if (below(4) == 0) sampling.stop = {std::string{1, 2, 3, static_cast<char>(below(11))}};
    if (below(4) == 0) sampling.logit_bias = {{1, 0.5f}};
    if (sampling.min_new_tokens == 0 && below(3) == 0)
      sampling.grammar = {GrammarSpec::Kind::kRegex, "hashed"};
    if (below(3) == 0) request.routed_experts_from = below(static_cast<int>(request.input_ids.size()));
    return request;
  }

  void check_sizes(std::span<const Batch> groups, const NgramLimits& drafts) const {
    const int64_t num_groups = std::ssize(groups);
    const SchedulerLimits limits = group_limits(shape_.scheduler, static_cast<int>(num_groups));
    const int64_t num_decode_rows = limits.max_running_requests * (1 + drafts.max_tokens);
    for (const Batch& batch : groups) {
      EXPECT_LE(std::ssize(batch.token_ids), limits.max_prefill_tokens + num_decode_rows);
      EXPECT_LE(std::ssize(batch.logit_rows), num_decode_rows);
    }
  }

  std::mt19937 random_;
  LoopShape shape_;
  std::vector<Request> requests_;
};

// Few pages, window pages, groups, chunks, penalties, stop strings, log-probabilities and cancelled requests.
TEST_P(StepLoopDrafts, OutputsOfACrowdAreThoseWithoutDrafts) {
  int64_t num_retracted = 0, num_proposed = 0, num_correct = 0;
  for (int round = 0; round < 96; ++round) {
    Crowd crowd(round);
    EngineStats stats, drafted_stats;
    const std::vector<Answer> plain = crowd.run({}, false, stats);
    const NgramLimits drafts{.max_tokens = 1 + round % 7, .min_match = 1 + round % 2, .max_match = 5};
    const std::vector<Answer> drafted = crowd.run(drafts, GetParam(), drafted_stats);
    for (size_t i = 0; i < plain.size(); ++i)
      expect_equal(drafted[i], plain[i], "round " + std::to_string(round) + " request " + std::to_string(i));
    EXPECT_EQ(stats.spec_verify_calls_total, 0);
    num_retracted += drafted_stats.num_retracted_reqs;
    num_proposed += drafted_stats.spec_proposed_drafts_total;
    num_correct += drafted_stats.spec_correct_drafts_total;
  }
  EXPECT_GT(num_retracted, 0);
  EXPECT_GT(num_correct, 3000);
  EXPECT_GT(num_proposed, num_correct);
}

}  // namespace
}  // namespace fp4moe
