// Routed experts, through the step loop.
#include <gtest/gtest.h>

#include "engine/step/step_loop.h"
#include "engine/test_loop.h"

namespace fp4moe {
namespace {

// Experts of all tokens but the last, from `from` on.
std::vector<int32_t> expected_experts(std::vector<int32_t> prompt, const Answer& answer, int64_t from) {
  std::vector<int32_t> expected;
  prompt.insert(prompt.end(), answer.token_ids.begin(), answer.token_ids.end());
  for (int64_t p = from; p + 1 < std::ssize(prompt); ++p)
    for (int64_t layer = 0; layer < 2; ++layer)
      for (const int32_t id : fake_experts(prompt[static_cast<size_t>(p)], p, layer)) expected.push_back(id);
  return expected;
}

std::vector<int32_t> prompt_of(size_t i) {
  std::vector<int32_t> prompt;
  for (size_t k = 0; k <= i * 5 % 53; ++k) prompt.push_back(static_cast<int32_t>(i % 4 * 11 + k * 3) % 200);
  return prompt;
}

// Runs prompts of all lengths with common prefixes together with requests that do not report experts, with
// chunks, few rows of logits, and so few pages that requests are retracted; also with an executor that
// samples and runs ahead.
TEST(StepLoopExperts, AreThoseOfEachToken) {
  for (const auto& [max_running, num_pages, samples] :
       std::vector<std::tuple<int64_t, int64_t, bool>>{{1, 256, false},
                                                       {1, 40, true},
                                                       {3, 256, true},
                                                       {3, 40, false},
                                                       {8, 256, false},
                                                       {8, 40, false},
                                                       {8, 256, true},
                                                       {8, 40, true}}) {
    Gate gate;
    TestLoop loop(hashed_logits,
                  {.num_pages = num_pages,
                   .scheduler = {.max_running_requests = max_running,
                                 .chunked_prefill_size = 16,
                                 .max_prefill_tokens = 32},
                   .samples = samples},
                  gate.hook());
    std::vector<Collector> collectors(24);
    const auto from_of = [](size_t i) {
      return i % 5 == 4 ? -1 : static_cast<int64_t>(i % 3 == 0 ? 0 : i * 5 % 53 / 2);
    };
    for (size_t i = 0; i < collectors.size(); ++i) {
      Request request{.input_ids = prompt_of(i), .routed_experts_from = from_of(i)};
      request.sampling.temperature = 0;
      request.sampling.ignore_eos = true;
      request.sampling.max_new_tokens = static_cast<int64_t>(i % 4) * 9;
      if (i % 2 == 0) {  // also requests prompt scores, from another token on
        request.sampling.top_logprobs = 0;
        request.prompt_logprobs_from = std::ssize(request.input_ids) / 2;
        if (i % 8 == 4) request.sampling.token_ids_logprob = {3};  // has a row more than the reported experts
      }
      EXPECT_TRUE(loop->submit(request, collectors[i].callback()).ok()) << i;
    }
    gate.open();
    for (size_t i = 0; i < collectors.size(); ++i) {
      const Answer& answer = collectors[i].wait();
      EXPECT_EQ(answer.reason(), FinishReason::kLength);
      EXPECT_EQ(answer.token_ids.size(), i % 4 * 9);
      const size_t num_scores =
          prompt_of(i).size() - std::min(prompt_of(i).size(), prompt_of(i).size() / 2 + 1);
      EXPECT_EQ(answer.prompt_logprobs.size(), i % 2 == 0 ? num_scores : 0);
      if (from_of(i) < 0) {
        EXPECT_EQ(answer.last.routed_experts, nullptr);
      } else {
        ASSERT_NE(answer.last.routed_experts, nullptr) << i;
        EXPECT_EQ(*answer.last.routed_experts, expected_experts(prompt_of(i), answer, from_of(i))) << i;
      }
    }
    const EngineStats stats = loop.finish();
    if (max_running == 8 && num_pages == 40) {
      EXPECT_GT(stats.num_retracted_reqs, 0);
    }
  }
}

TEST(StepLoopExperts, PagesOfOthersServeOnlyWhatIsNotAsked) {
  TestLoop loop(hashed_logits);
  const std::vector<int32_t> prompt = prompt_of(10);
  const auto run = [&](int64_t from) {
    return loop.run(
        Request{.input_ids = prompt, .sampling = {.temperature = 0}, .routed_experts_from = from});
  };
  EXPECT_EQ(run(0).last.cached_tokens, 0);
  EXPECT_EQ(run(0).last.cached_tokens, 0);
  const Answer later = run(21);
  EXPECT_EQ(later.last.cached_tokens, 20);
  EXPECT_EQ(*later.last.routed_experts, expected_experts(prompt, later, 21));
  EXPECT_GT(run(-1).last.cached_tokens, 40);
}

TEST(StepLoopExperts, AnExecutorThatDoesNotTellThemRefuses) {
  TestLoop loop(hashed_logits, {.supports_routed_experts = false});
  const auto refused =
      loop->submit({.input_ids = {1}, .routed_experts_from = 0}, [](const Delta&) { ADD_FAILURE(); });
  EXPECT_EQ(refused.status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(refused.status().message(),
            "return_routed_experts: this executor does not report routed experts");
}

}  // namespace
}  // namespace fp4moe
