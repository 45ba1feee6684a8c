// The step loop with drafters of known acceptance, with and without the adaptive choice.
#include <gtest/gtest.h>

#include <chrono>
#include <numeric>
#include <random>
#include <thread>

#include "engine/test_loop.h"

namespace fp4moe {
namespace {

constexpr int64_t kMaxDrafts = 4, kNumTokens = 201;
const LoopShape kShape{.num_pages = 1024, .context_length = 256};

// Requests with different prompts, half of them greedy, and their outputs without drafts.
struct Requests {
  explicit Requests(int num_requests) {
    TestLoop plain(hashed_logits, kShape);
    for (int32_t i = 0; i < num_requests; ++i) {
      SamplingParams sampling{
          .temperature = i % 2 == 0 ? 0.0f : 1.0f, .seed = 7, .max_new_tokens = kNumTokens};
      sampling.ignore_eos = true;
      list.push_back({"", {1, 2, i}, sampling});
      answers.push_back(plain.run(list.back()));
    }
  }
  std::vector<Request> list;
  std::vector<Answer> answers;
};

// Drafts that are right with the probability `acceptance` if the draft before them is.
LoopShape shape_of(const Requests& requests, double acceptance) {
  LoopShape shape = kShape;
  shape.drafts.max_tokens = kMaxDrafts;
  shape.draft_source = [&requests, acceptance](std::span<const int32_t> ids, int64_t most) {
    const size_t num_prompt = requests.list[0].input_ids.size(), first = ids.size() - num_prompt;
    const auto is_asked = [&](const Request& request) {
      return std::ranges::equal(ids.first(num_prompt), request.input_ids);
    };
    const auto request = std::ranges::find_if(requests.list, is_asked) - requests.list.begin();
    const std::vector<int32_t>& output = requests.answers[static_cast<size_t>(request)].token_ids;
    std::vector<int32_t> drafts;
    for (size_t i = first; i < std::min(first + static_cast<size_t>(most), output.size()); ++i) {
      const bool is_right =
          token_random(static_cast<uint64_t>(request), static_cast<int64_t>(i)) < acceptance;
      drafts.push_back(is_right ? output[i] : output[i] == 0 ? 1 : output[i] - 1);
    }
    return drafts;
  };
  return shape;
}

// Random ids below the number of tokens.
LoopShape with_random_drafts() {
  LoopShape shape = kShape;
  shape.drafts.max_tokens = kMaxDrafts;
  const auto random = std::make_shared<std::mt19937>(1);
  shape.draft_source = [random](std::span<const int32_t>, int64_t most) {
    std::vector<int32_t> ids(static_cast<size_t>(most));
    for (int32_t& id : ids) id = static_cast<int32_t>((*random)() % 250);
    return ids;
  };
  return shape;
}

EngineStats run_all(TestLoop& loop, const Requests& requests, std::vector<Answer>& answers) {
  std::vector<Collector> collectors(requests.list.size());
  for (size_t i = 0; i < requests.list.size(); ++i)
    EXPECT_TRUE(loop->submit(requests.list[i], collectors[i].callback()).ok());
  for (size_t i = 0; i < collectors.size(); ++i) {
    answers.push_back(collectors[i].wait());
    EXPECT_EQ(answers[i].token_ids, requests.answers[i].token_ids) << "request " << i;
    EXPECT_EQ(answers[i].text, requests.answers[i].text);
  }
  return loop.finish();
}

// The histogram, the counters by position and the totals are of the same drafts.
void check_counts(const EngineStats& stats, const std::vector<Answer>& answers) {
  int64_t num_steps = 0, num_correct = 0;
  std::vector<int64_t> correct(kMaxDrafts);
  for (const Answer& answer : answers) {
    const std::vector<int64_t>& steps = answer.last.spec_correct_drafts_histogram;
    ASSERT_LE(steps.size(), static_cast<size_t>(kMaxDrafts) + 1);
    int64_t own_steps = 0, own_correct = 0;
    for (size_t n = 0; n < steps.size(); ++n) {
      own_steps += steps[n];
      own_correct += static_cast<int64_t>(n) * steps[n];
      for (size_t i = 0; i < n; ++i) correct[i] += steps[n];
    }
    EXPECT_EQ(own_steps, answer.last.spec_verify_ct);
    EXPECT_EQ(own_correct, answer.last.spec_num_correct_drafts);
    EXPECT_EQ(own_steps + own_correct, answer.last.completion_tokens - 1);
    num_steps += own_steps;
    num_correct += own_correct;
  }
  EXPECT_EQ(stats.spec_verify_calls_total, num_steps);
  EXPECT_EQ(stats.spec_correct_drafts_total, num_correct);
  EXPECT_EQ(stats.spec_correct_by_position, correct);
  const std::vector<int64_t>& proposed = stats.spec_proposed_by_position;
  EXPECT_EQ(std::accumulate(proposed.begin(), proposed.end(), int64_t{0}), stats.spec_proposed_drafts_total);
  EXPECT_TRUE(std::ranges::is_sorted(proposed, std::greater<>()));
}

TEST(StepLoopAdaptive, RightDraftsGiveAllTokensOfAStep) {
  const Requests requests(6);
  TestLoop loop(hashed_logits, shape_of(requests, 1));
  std::vector<Answer> answers;
  const EngineStats stats = run_all(loop, requests, answers);
  check_counts(stats, answers);
  EXPECT_EQ(stats.spec_verify_calls_total, 6 * 40) << "5 tokens in each step after the first token";
  EXPECT_EQ(stats.spec_correct_drafts_total, stats.spec_proposed_drafts_total);
  EXPECT_EQ(stats.spec_accept_length(), kMaxDrafts + 1);
}

TEST(StepLoopAdaptive, RandomDraftsChangeNothing) {
  const Requests requests(6);
  TestLoop loop(hashed_logits, with_random_drafts());
  std::vector<Answer> answers;
  const EngineStats stats = run_all(loop, requests, answers);
  check_counts(stats, answers);
  EXPECT_GT(stats.spec_proposed_drafts_total, 6 * 190 * kMaxDrafts);
  EXPECT_LT(stats.spec_accept_length(), 1.05);
}

TEST(StepLoopAdaptive, AcceptanceIsCountedByPosition) {
  const Requests requests(8);
  TestLoop loop(hashed_logits, shape_of(requests, 0.8));
  std::vector<Answer> answers;
  const EngineStats stats = run_all(loop, requests, answers);
  check_counts(stats, answers);
  for (size_t i = 0; i < static_cast<size_t>(kMaxDrafts); ++i)
    EXPECT_NEAR(static_cast<double>(stats.spec_correct_by_position[i]) /
                    static_cast<double>(stats.spec_proposed_by_position[i]),
                std::pow(0.8, static_cast<double>(i + 1)), 0.08)
        << "position " << i;
}

// The share of kept drafts is the synthetic acceptance, whatever the drafts are.
TEST(StepLoopAdaptive, SyntheticAcceptanceDecidesWhatIsKept) {
  for (const bool samples : {false, true}) {
    const Requests requests(8);
    LoopShape shape = with_random_drafts();
    shape.samples = samples;
    for (const double acceptance : {0.0, 0.8, 1.0}) {
      shape.synthetic_acceptance = acceptance;
      TestLoop loop(hashed_logits, shape);
      for (uint64_t seed = 0; Request request : requests.list) {
        request.sampling.seed = seed++;
        EXPECT_EQ(loop.run(request).token_ids.size(), static_cast<size_t>(kNumTokens));
      }
      const EngineStats stats = loop.finish();
      double kept = 1;
      for (size_t i = 0; i < static_cast<size_t>(kMaxDrafts); ++i) {
        kept *= acceptance;
        EXPECT_NEAR(static_cast<double>(stats.spec_correct_by_position[i]) /
                        static_cast<double>(stats.spec_proposed_by_position[i]),
                    kept, acceptance == 0.8 ? 0.08 : 0)
            << "position " << i << ", acceptance " << acceptance << ", samples " << samples;
      }
    }
  }
}

// A model whose step takes a time, and as much again for every two rows after the first.
void take_time(const Batch& batch) {
  constexpr std::chrono::milliseconds kStep(2);
  const auto num_rows = static_cast<int64_t>(batch.token_ids.size());
  std::this_thread::sleep_for(kStep + (num_rows - 1) * kStep / 2);
}

TEST(StepLoopAdaptive, RandomDraftsAreSoonLeftOut) {
  const Requests requests(1);
  LoopShape shape = with_random_drafts();
  shape.adaptive = StepCost{};
  TestLoop loop(hashed_logits, shape, take_time);
  std::vector<Answer> answers;
  const EngineStats stats = run_all(loop, requests, answers);
  check_counts(stats, answers);
  EXPECT_GT(stats.spec_proposed_drafts_total, 0) << "nothing was tried";
  EXPECT_LT(stats.spec_proposed_drafts_total, 20);
}

TEST(StepLoopAdaptive, RightDraftsAreSoonAllUsed) {
  const Requests requests(1);
  LoopShape shape = shape_of(requests, 1);
  shape.adaptive = StepCost{};
  TestLoop loop(hashed_logits, shape, take_time);
  std::vector<Answer> answers;
  const EngineStats stats = run_all(loop, requests, answers);
  check_counts(stats, answers);
  EXPECT_EQ(stats.spec_correct_drafts_total, stats.spec_proposed_drafts_total);
  EXPECT_GT(answers[0].last.spec_correct_drafts_histogram.at(kMaxDrafts), 25) << "of 40 steps";
}

}  // namespace
}  // namespace fp4moe
