// Sampling parameters through the step loop: with the host's sampler, and with an executor that samples and
// runs ahead.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <map>

#include "engine/step/step_loop.h"
#include "engine/test_loop.h"

namespace fp4moe {
namespace {

constexpr int32_t kNumTokens = kFirstWordId + 2;  // ids from here on have no token

// Greedy output of the fake model with penalties and bias, computed from their definitions.
std::vector<int32_t> expected_answer(std::vector<int32_t> history, const SamplingParams& p) {
  std::vector<float> logits(kVocab);
  std::vector<int32_t> answer;
  std::map<int32_t, int> counts;
  while (std::ssize(answer) < p.max_new_tokens) {
    hashed_logits(history, logits);
    for (const auto& [id, count] : counts) {
      float& x = logits[static_cast<size_t>(id)];
      x -= p.frequency_penalty * static_cast<float>(count) + p.presence_penalty;
      x = x < 0 ? x * p.repetition_penalty : x / p.repetition_penalty;
    }
    for (const LogitBias& bias : p.logit_bias) logits[static_cast<size_t>(bias.token_id)] += bias.bias;
    if (std::ssize(answer) < p.min_new_tokens) {
      logits[kEosId] = -std::numeric_limits<float>::infinity();
      for (const int32_t id : p.stop_token_ids)
        logits[static_cast<size_t>(id)] = -std::numeric_limits<float>::infinity();
    }
    const auto end = logits.begin() + kNumTokens;
    answer.push_back(static_cast<int32_t>(std::max_element(logits.begin(), end) - logits.begin()));
    const bool stops = std::ranges::count(p.stop_token_ids, answer.back()) > 0;
    if (stops || answer.back() == kEosId) break;
    history.push_back(answer.back());
    ++counts[answer.back()];
  }
  return answer;
}

// The model prefers a few ids: without penalties its outputs repeat them.
void few_ids(std::span<const int32_t> history, std::span<float> logits) {
  hashed_logits(history, logits);
  for (size_t id = 12; id < logits.size(); ++id) logits[id] -= 9;
}

std::vector<SamplingParams> requests() {
  std::vector<SamplingParams> all;
  for (int i = 0; i < 24; ++i) {
    SamplingParams p{.temperature = 0, .max_new_tokens = 10 + i};
    if (i % 2 == 1) p.frequency_penalty = 0.125f * static_cast<float>(i - 12);
    if (i % 3 == 1) p.presence_penalty = i % 2 == 0 ? 1.5f : -0.5f;
    if (i % 4 == 1) p.repetition_penalty = i < 12 ? 1.5f : 0.5f;
    if (i % 5 == 1) p.logit_bias = {{i, 4.0f}, {i + 20, 1.5f}, {i + 40, -100.0f}};
    if (i % 4 == 2) {
      p.stop_token_ids = {1, 2, 3, 4, 5, 6};
      p.min_new_tokens = i % 8 == 2 ? 7 : 0;
    }
    all.push_back(p);
  }
  return all;
}

class StepLoopSampling : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(, StepLoopSampling, testing::Bool(),
                         [](const auto& param) { return param.param ? "ByTheExecutor" : "OnTheHost"; });

// All requests at once, with few pages: neither parameters nor outputs affect other requests.
TEST_P(StepLoopSampling, AnswersAreThoseOfTheDefinition) {
  for (const int64_t num_pages : {256, 40}) {
    TestLoop loop(hashed_logits, {.num_pages = num_pages, .samples = GetParam()});
    const std::vector<SamplingParams> asked = requests();
    std::vector<Collector> collectors(asked.size());
    for (size_t i = 0; i < asked.size(); ++i) {
      const std::vector<int32_t> prompt(1 + i, static_cast<int32_t>(i));
      ASSERT_TRUE(loop->submit({"", prompt, asked[i]}, collectors[i].callback()).ok()) << i;
    }
    for (size_t i = 0; i < asked.size(); ++i)
      EXPECT_EQ(collectors[i].wait().token_ids,
                expected_answer(std::vector<int32_t>(1 + i, static_cast<int32_t>(i)), asked[i]))
          << "request " << i << " with " << num_pages << " pages";
    loop.finish();
  }
}

TEST_P(StepLoopSampling, APenaltyEndsRepetition) {
  TestLoop loop(few_ids, {.samples = GetParam()});
  const auto most_often = [](const Answer& answer) {
    std::map<int32_t, int> counts;
    int most = 0;
    for (const int32_t id : answer.token_ids) most = std::max(most, ++counts[id]);
    return most;
  };
  SamplingParams sampling{.temperature = 1, .seed = 4, .max_new_tokens = 60, .ignore_eos = true};
  EXPECT_GT(most_often(loop.run({1}, sampling)), 5);
  sampling.presence_penalty = 2;
  sampling.frequency_penalty = 2;
  sampling.repetition_penalty = 1.5f;
  const Answer once = loop.run({1}, sampling), again = loop.run({1}, sampling);
  EXPECT_LE(most_often(once), 5);
  EXPECT_EQ(once.token_ids, again.token_ids);
}

TEST_P(StepLoopSampling, LogprobsAreTheModelsOwn) {
  TestLoop loop(hashed_logits, {.samples = GetParam()});
  SamplingParams sampling = requests()[21];
  sampling.logit_bias = {{17, 50.0f}};
  sampling.top_logprobs = 2;
  const Answer answer = loop.run({1, 2}, sampling);
  std::vector<int32_t> history = {1, 2};
  ASSERT_GT(answer.logprobs.size(), 5u);
  for (const PositionLogprobs& position : answer.logprobs) {
    std::vector<float> logits(kVocab);
    hashed_logits(history, logits);
    double total = 0;
    for (const float x : logits) total += std::exp(double{x});
    const auto id = static_cast<size_t>(position.chosen.token_id);
    EXPECT_NEAR(position.chosen.logprob, logits[id] - std::log(total), 1e-5);
    const auto best = std::max_element(logits.begin(), logits.begin() + kNumTokens);
    EXPECT_EQ(position.top[0].token_id, best - logits.begin());
    history.push_back(position.chosen.token_id);
  }
}

TEST_P(StepLoopSampling, NothingEndsTheAnswerBeforeMinNewTokens) {
  TestLoop loop(says("ab\ncd\nef"), {.samples = GetParam()});
  SamplingParams sampling = greedy(20);
  sampling.stop = {"\n"};
  EXPECT_EQ(loop.run({'x'}, sampling).text, "ab");
  sampling.min_new_tokens = 4;
  const Answer later = loop.run({'x'}, sampling);
  EXPECT_EQ(later.text, "ab\ncd");
  EXPECT_EQ(later.token_ids.size(), 6u);
  sampling.min_new_tokens = 6;  // reached at the token that stops
  EXPECT_EQ(loop.run({'x'}, sampling).text, "ab\ncd");
  sampling.min_new_tokens = 15;  // the model would end after 8
  const Answer longest = loop.run({'x'}, sampling);
  EXPECT_GE(longest.token_ids.size(), 15u);
  EXPECT_EQ(longest.text.substr(0, 8), "ab\ncd\nef");
  EXPECT_EQ(std::ranges::count(std::span(longest.token_ids).first(15), kEosId), 0);
}

// Checks the scores of each prompt token after `from` against the definition.
void expect_scores(const Answer& answer, const std::vector<int32_t>& prompt, int64_t from, size_t num_top) {
  const auto first = static_cast<size_t>(from) + 1;
  ASSERT_EQ(answer.prompt_logprobs.size(), prompt.size() - std::min(first, prompt.size()));
  for (size_t p = first; p < prompt.size(); ++p) {
    const PositionLogprobs& got = answer.prompt_logprobs[p - first];
    std::vector<float> logits(kVocab);
    hashed_logits(std::span(prompt).first(p), logits);
    double total = 0;
    for (const float x : logits) total += std::exp(double{x});
    EXPECT_EQ(got.chosen.token_id, prompt[p]);
    EXPECT_NEAR(got.chosen.logprob, logits[static_cast<size_t>(prompt[p])] - std::log(total), 1e-5);
    ASSERT_EQ(got.top.size(), num_top);
    const auto best = std::max_element(logits.begin(), logits.begin() + kNumTokens);
    if (num_top > 0) {
      EXPECT_EQ(got.top[0].token_id, best - logits.begin());
      EXPECT_NEAR(got.top[0].logprob, *best - std::log(total), 1e-5);
    }
  }
}

// Scores prompts of all lengths together with requests that only decode, with chunks, few pages and few logit
// rows.
TEST_P(StepLoopSampling, PromptsAreScored) {
  for (const int64_t max_running : {1, 3, 8})
    for (const int64_t num_pages : {256, 40}) {
      TestLoop loop(hashed_logits, {.num_pages = num_pages,
                                    .scheduler = {.max_running_requests = max_running,
                                                  .chunked_prefill_size = 16,
                                                  .max_prefill_tokens = 32},
                                    .samples = GetParam()});
      std::vector<Collector> collectors(24);
      const auto prompt_of = [](size_t i) {
        std::vector<int32_t> prompt;
        for (size_t k = 0; k <= i * 5 % 53; ++k)
          prompt.push_back(static_cast<int32_t>(i * 11 + k * 3) % kNumTokens);
        return prompt;
      };
      const auto from_of = [](size_t i) { return static_cast<int64_t>(i % 3 == 0 ? 0 : i * 5 % 53 / 2); };
      for (size_t i = 0; i < collectors.size(); ++i) {
        Request request{"", prompt_of(i), greedy(static_cast<int64_t>(i % 4) * 5)};
        request.sampling.ignore_eos = true;
        request.sampling.top_logprobs = static_cast<int32_t>(i % 3);
        if (i % 5 != 4) request.prompt_logprobs_from = from_of(i);
        ASSERT_TRUE(loop->submit(request, collectors[i].callback()).ok()) << i;
      }
      for (size_t i = 0; i < collectors.size(); ++i) {
        const Answer& answer = collectors[i].wait();
        EXPECT_EQ(answer.reason(), FinishReason::kLength);
        EXPECT_EQ(answer.token_ids.size(), i % 4 * 5);
        if (i % 5 == 4) {
          EXPECT_TRUE(answer.prompt_logprobs.empty());
        } else {
          expect_scores(answer, prompt_of(i), from_of(i), i % 3);
        }
      }
      loop.finish();
    }
}

TEST_P(StepLoopSampling, ScoresBeforeAnAnswer) {
  TestLoop loop(hashed_logits, {.samples = GetParam()});
  SamplingParams sampling = greedy(4);
  sampling.top_logprobs = 1;
  const std::vector<int32_t> prompt = {4, 5, 6, 7};
  const Answer plain = loop.run(prompt, sampling);
  const Answer scored =
      loop.run(Request{.input_ids = prompt, .sampling = sampling, .prompt_logprobs_from = 1});
  EXPECT_EQ(scored.token_ids, plain.token_ids);
  expect_scores(scored, prompt, 1, 1);
  EXPECT_EQ(
      loop.run(Request{.input_ids = {4}, .sampling = sampling, .prompt_logprobs_from = 0}).token_ids.size(),
      4u);
}

// Compares the listed ids of a position with the definition.
void expect_ids(const PositionLogprobs& got, std::span<const int32_t> history, const SamplingParams& asked) {
  std::vector<float> logits(kVocab);
  hashed_logits(history, logits);
  double total = 0;
  for (const float x : logits) total += std::exp(double{x});
  ASSERT_EQ(got.ids.size(), asked.token_ids_logprob.size());
  for (size_t k = 0; k < got.ids.size(); ++k) {
    const int32_t id = asked.token_ids_logprob[k];
    EXPECT_EQ(got.ids[k].token_id, id);
    EXPECT_NEAR(got.ids[k].logprob, logits[static_cast<size_t>(id)] - std::log(total), 1e-5);
    if (id < 128 || id >= kNumTokens) {
      EXPECT_EQ(got.ids[k].bytes, std::string(id < 128 ? 1 : 0, static_cast<char>(id)));
    }
  }
}

// Listed ids come in the request's order, with repetitions and with ids that have no token. Many requests run
// at once; some end while a step with their rows is in flight.
TEST_P(StepLoopSampling, ListedIdsHaveLogprobs) {
  TestLoop loop(
      hashed_logits,
      {.scheduler = {.max_running_requests = 5, .chunked_prefill_size = 16, .max_prefill_tokens = 32},
       .samples = GetParam()});
  std::vector<Request> requests;
  std::vector<Collector> collectors(30);
  for (size_t i = 0; i < collectors.size(); ++i) {
    Request request{.sampling = greedy(static_cast<int64_t>(i % 6) * 3)};
    for (size_t k = 0; k <= i * 7 % 40; ++k)
      request.input_ids.push_back(static_cast<int32_t>(i * 11 + k * 3) % kNumTokens);
    request.sampling.top_logprobs = static_cast<int32_t>(i % 3);
    request.sampling.logit_bias = {{17, 6.0f}, {'b', -20.0f}};
    request.sampling.stop_token_ids = {17};
    for (size_t k = 0; k < i % 7 * i % 129; ++k)
      request.sampling.token_ids_logprob.push_back(static_cast<int32_t>(i * 31 + k * k * 5) % kVocab);
    if (i % 7 == 1) request.sampling.token_ids_logprob = {'b', kVocab - 1, 17, 'b', 0};
    if (i % 4 != 3) request.prompt_logprobs_from = static_cast<int64_t>(i % 4);
    request.prompt_logprobs_from = std::min(request.prompt_logprobs_from, std::ssize(request.input_ids));
    ASSERT_TRUE(loop->submit(request, collectors[i].callback()).ok()) << i;
    requests.push_back(std::move(request));
  }
  for (size_t i = 0; i < collectors.size(); ++i) {
    const Answer& answer = collectors[i].wait();
    const Request& request = requests[i];
    const auto first_scored = static_cast<size_t>(request.prompt_logprobs_from) + 1;
    for (size_t p = 0; p < answer.prompt_logprobs.size(); ++p)
      expect_ids(answer.prompt_logprobs[p], std::span(request.input_ids).first(first_scored + p),
                 request.sampling);
    std::vector<int32_t> history = request.input_ids;
    const bool is_only_prompt = request.sampling.max_new_tokens == 0;
    ASSERT_EQ(answer.logprobs.size(), !is_only_prompt                              ? answer.token_ids.size()
                                      : request.sampling.token_ids_logprob.empty() ? 0
                                                                                   : 1);
    for (const PositionLogprobs& position : answer.logprobs) {
      expect_ids(position, history, request.sampling);
      EXPECT_EQ(position.chosen.token_id < 0, is_only_prompt);
      history.push_back(position.chosen.token_id);
    }
  }
  loop.finish();
}

// Without output, the ids' log-probabilities after the prompt are those of the first output token, also if
// the prompt's pages are reused.
TEST_P(StepLoopSampling, ListedIdsOfAPromptWithoutOutput) {
  TestLoop loop(hashed_logits, {.samples = GetParam()});
  SamplingParams sampling = greedy(0);
  sampling.top_logprobs = 2;
  sampling.token_ids_logprob = {9, 4};
  for (const int64_t num_tokens : {1, 2, 40, 40, 41}) {
    std::vector<int32_t> prompt;
    for (int64_t i = 0; i < num_tokens; ++i) prompt.push_back(static_cast<int32_t>(i));
    const Answer answer = loop.run(prompt, sampling);
    EXPECT_EQ(answer.reason(), FinishReason::kLength);
    EXPECT_TRUE(answer.token_ids.empty());
    EXPECT_TRUE(answer.prompt_logprobs.empty());
    ASSERT_EQ(answer.logprobs.size(), 1u);
    EXPECT_EQ(answer.logprobs[0].chosen.token_id, -1);
    EXPECT_EQ(answer.logprobs[0].top.size(), 2u);
    expect_ids(answer.logprobs[0], prompt, sampling);
  }
  const EngineStats stats = loop.finish();
  EXPECT_EQ(stats.generation_tokens_total, 0);
  EXPECT_GT(stats.cached_tokens_total, 0);
}

TEST(StepLoopRequests, ABadRowOfAPromptFailsItsRequest) {
  const FakeLogits nan_at_3 = [](std::span<const int32_t> history, std::span<float> logits) {
    hashed_logits(history, logits);
    if (history.size() == 3) logits[0] = std::numeric_limits<float>::quiet_NaN();
  };
  for (const bool samples : {false, true}) {
    TestLoop loop(nan_at_3, {.samples = samples});
    const Request request{
        .input_ids = {1, 2, 3, 4, 5}, .sampling = {.top_logprobs = 0}, .prompt_logprobs_from = 0};
    EXPECT_EQ(loop.run(request).last.error, "the model's logits hold NaN or infinity");
    loop.finish();
  }
}

TEST_P(StepLoopSampling, StopExpressions) {
  TestLoop loop(says("one 12 two 345; three"), {.samples = GetParam()});
  SamplingParams sampling = greedy(30);
  sampling.stop_regex = {"[0-9]{3}", "x"};
  const Answer answer = loop.run({'x'}, sampling);
  EXPECT_EQ(answer.text, "one 12 two ");
  EXPECT_EQ(answer.reason(), FinishReason::kStop);
  EXPECT_EQ(answer.last.matched_stop, "[0-9]{3}");
  EXPECT_EQ(answer.token_ids.size(), 14u);
  sampling.no_stop_trim = true;
  EXPECT_EQ(loop.run({'x'}, sampling).text, "one 12 two 345");
  sampling.no_stop_trim = false;
  sampling.stop = {"two"};
  EXPECT_EQ(loop.run({'x'}, sampling).text, "one 12 ");
  sampling.stop = {};
  sampling.stop_regex = {"[0-9]+"};
  EXPECT_EQ(loop.run({'x'}, sampling).text, "one ");
  sampling.min_new_tokens = 6;  // reached at the token that stops
  EXPECT_EQ(loop.run({'x'}, sampling).text, "one 1");
  sampling.stop_regex = {"345; thr(?!ee)"};  // matches as soon as the text so far matches
  EXPECT_EQ(loop.run({'x'}, sampling).text, "one 12 two ");
  sampling.stop_regex = {"(e|e )+!"};
  EXPECT_EQ(loop.run({'x'}, sampling).text, "one 12 two 345; three");
}

TEST(StepLoopRequests, AnExpressionThatExplodesFailsItsRequestAlone) {
  TestLoop loop(says(std::string(60, 'a')));
  SamplingParams sampling = greedy(50);
  Collector other;
  ASSERT_TRUE(loop->submit({"", {'x'}, sampling}, other.callback()).ok());
  sampling.stop_regex = {"(a+)+b"};
  const Answer bad = loop.run({'x'}, sampling);
  EXPECT_EQ(bad.reason(), FinishReason::kError);
  EXPECT_NE(bad.last.error.find("stop_regex[0]"), std::string::npos) << bad.last.error;
  EXPECT_EQ(other.wait().token_ids.size(), 50u);
  loop.finish();
}

TEST(StepLoopRequests, AnIdIsFreeAsSoonAsItsEndIsHeard) {
  TestLoop loop;
  Collector next;
  std::atomic<bool> was_refused = false;
  const Request request{.id = "mine", .input_ids = {1}, .sampling = greedy(3)};
  const auto on_delta = [&](const Delta& delta) {
    if (delta.finish_reason == FinishReason::kNone) {
      was_refused = !loop->submit(request, [](const Delta&) { ADD_FAILURE(); }).ok();
    } else {
      loop->cancel("mine");  // no longer matches an active request
      EXPECT_TRUE(loop->submit(request, next.callback()).ok());
    }
  };
  ASSERT_TRUE(loop->submit(request, on_delta).ok());
  EXPECT_EQ(next.wait().reason(), FinishReason::kLength);
  EXPECT_TRUE(was_refused);
  loop.finish();
}

TEST(StepLoopRequests, RefusesWhatIsIllegal) {
  TestLoop loop;
  const auto refusal = [&](const SamplingParams& sampling) {
    return loop->submit({"", {1}, sampling}, [](const Delta&) { ADD_FAILURE(); }).status().message();
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(refusal({.min_p = 1.5f}), "min_p=1.500000; must be between 0 and 1");
  EXPECT_EQ(refusal({.min_p = nan}), "min_p=nan; must be between 0 and 1");
  EXPECT_EQ(refusal({.frequency_penalty = 2.5f}), "frequency_penalty=2.500000; must be between -2 and 2");
  EXPECT_EQ(refusal({.presence_penalty = nan}), "presence_penalty=nan; must be between -2 and 2");
  EXPECT_EQ(refusal({.repetition_penalty = 0}), "repetition_penalty=0.000000; must be above 0 and at most 2");
  EXPECT_EQ(refusal({.logit_bias = {{300, 1}}}), "logit_bias[300]: token ids must be between 0 and 299");
  EXPECT_EQ(refusal({.logit_bias = {{-1, 1}}}), "logit_bias[-1]: token ids must be between 0 and 299");
  EXPECT_EQ(refusal({.logit_bias = {{3, 101}}}), "logit_bias[3]=101.000000; must be between -100 and 100");
  EXPECT_EQ(refusal({.logit_bias = {{3, 1}, {3, 1}}}), "logit_bias names token 3 twice");
  EXPECT_EQ(refusal({.logit_bias = std::vector<LogitBias>(1025)}),
            "logit_bias: tokens=1025; must be at most 1024");
  EXPECT_EQ(refusal({.max_new_tokens = 4, .min_new_tokens = 5}),
            "min_new_tokens=5; must be between 0 and max_new_tokens=4");
  EXPECT_EQ(refusal({.stop_regex = {"a", "(b"}}),
            "stop_regex[1] does not compile: missing closing parenthesis at byte 2");
  EXPECT_EQ(refusal({.stop_regex = {""}}), "stop_regex[0]: bytes=0; must be between 1 and 1024");
  EXPECT_EQ(refusal({.stop_regex = std::vector<std::string>(17, "a")}),
            "stop_regex: expressions=17; must be at most 16");
  const auto refused = [&](const Request& request) {
    return loop->submit(request, [](const Delta&) { ADD_FAILURE(); }).status().message();
  };
  EXPECT_EQ(refused({.input_ids = {1}, .sampling = {.top_logprobs = 0}, .prompt_logprobs_from = 2}),
            "prompt_logprobs_from=2; must be between -1 (none) and 1, the number of prompt tokens");
  EXPECT_EQ(refused({.input_ids = {1}, .prompt_logprobs_from = 0}),
            "top_logprobs=-1; must be at least 0 if the prompt's logprobs are requested");
  EXPECT_EQ(refused({.input_ids = {1}, .sampling = {.token_ids_logprob = {1}}}),
            "top_logprobs=-1; must be at least 0 with token_ids_logprob");
  EXPECT_EQ(refused({.input_ids = {1}, .sampling = {.top_logprobs = 0, .token_ids_logprob = {1, 300}}}),
            "token_ids_logprob[1]=300; must be between 0 and 299, because the vocabulary has 300 tokens");
  EXPECT_EQ(refused({.input_ids = {1}, .sampling = {.top_logprobs = 0, .token_ids_logprob = {-1}}}),
            "token_ids_logprob[0]=-1; must be between 0 and 299, because the vocabulary has 300 tokens");
  std::vector<int32_t> ids(129);
  EXPECT_EQ(refused({.input_ids = {1}, .sampling = {.top_logprobs = 0, .token_ids_logprob = ids}}),
            "token_ids_logprob: ids=129; must be at most 128");
  ids.resize(128);
  EXPECT_EQ(
      refused({.input_ids = std::vector<int32_t>(20000),
               .sampling = {.top_logprobs = 0, .token_ids_logprob = ids},
               .prompt_logprobs_from = 0}),
      "token_ids_logprob: ids=128; must be at most 104 for the 20000 prompt tokens whose log-probabilities "
      "are requested");
  EXPECT_EQ(refused({.input_ids = {1}, .routed_experts_from = 2}),
            "routed_experts_from=2; must be between -1 (none) and 1, the number of prompt tokens");
  EXPECT_EQ(refused({.input_ids = {1}, .priority = int64_t{1} << 31}),
            "priority=2147483648; must be -2147483647 to 2147483647");
}

}  // namespace
}  // namespace fp4moe
