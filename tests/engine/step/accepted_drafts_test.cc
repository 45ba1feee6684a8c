// Drafts that the executor accepts: the next step is planned, drafted and enqueued while the host does not
// know the last step's tokens. Outputs equal those of a loop that waits for them, and of one without drafts.
// model_drafter_test.cc runs all its cases this way too.
#include <gtest/gtest.h>

#include <random>

#include "engine/crowd_shape.h"
#include "engine/drafting_loop.h"
#include "engine/fake_grammar.h"

namespace fp4moe {
namespace {

constexpr Way kWaits{.takes_features = true, .are_kept = true, .most_ahead = 1000};
constexpr Way kAccepts{.takes_features = true, .are_kept = true, .most_ahead = 1000, .are_accepted = true};

// A draft model that is right, but for one in `period` histories; 0: never right.
FakeLogits right_but_for(uint32_t period) {
  return [period](std::span<const int32_t> history, std::span<float> logits) {
    hashed_choice(history, logits);
    if (period != 0 && (static_cast<uint32_t>(history.back()) + history.size()) % period != 0) return;
    const auto best = std::ranges::max_element(logits) - logits.begin();
    logits[static_cast<size_t>(best + 1) % logits.size()] = 100;
  };
}

void expect_equal(const Answer& actual, const Answer& expected, const std::string& what) {
  EXPECT_EQ(actual.token_ids, expected.token_ids) << what;
  EXPECT_EQ(actual.text, expected.text) << what;
  EXPECT_EQ(actual.reason(), expected.reason()) << what;
  EXPECT_EQ(actual.last.completion_tokens, expected.last.completion_tokens) << what;
  EXPECT_EQ(actual.last.prompt_tokens, expected.last.prompt_tokens) << what;
  EXPECT_EQ(actual.last.matched_stop, expected.last.matched_stop) << what;
  EXPECT_EQ(actual.last.matched_stop_token, expected.last.matched_stop_token) << what;
}

// None, some and all drafts are right.
TEST(AcceptedDrafts, ChangeNeitherTheTextNorTheUsage) {
  for (const uint32_t period : {0u, 2u, 3u, 5u, 1000u}) {
    const std::string what = "wrong once in " + std::to_string(period);
    Drafting waits(hashed_choice, right_but_for(period), {}, kWaits);
    Drafting accepts(hashed_choice, right_but_for(period), {}, kAccepts);
    TestLoop plain(hashed_choice);
    for (const int64_t prompt : {1, 3, 4, 16, 33}) {
      const Answer expected = waits->run(numbers(20, prompt), endless(61));
      const Answer actual = accepts->run(numbers(20, prompt), endless(61));
      expect_equal(actual, expected, what);
      expect_equal(actual, plain.run(numbers(20, prompt), endless(61)), what);
      // In the last two steps a sequence has fewer drafts, because those in flight may be right.
      const Delta& a = actual.last;
      EXPECT_EQ(a.completion_tokens, 1 + a.spec_verify_ct + a.spec_num_correct_drafts) << what;
      EXPECT_GE(a.spec_verify_ct, expected.last.spec_verify_ct) << what;
      EXPECT_LE(a.spec_verify_ct, expected.last.spec_verify_ct + 2) << what;
      EXPECT_LE(a.spec_num_proposed_drafts, expected.last.spec_num_proposed_drafts) << what;
    }
    EXPECT_EQ(waits->executor().num_steps_ahead, 0);
    EXPECT_GT(accepts->executor().num_steps_ahead, 5 * 10) << what;
    accepts->finish();
  }
}

// All steps but the first with drafts are enqueued before the tokens of the one before are known.
TEST(AcceptedDrafts, KeepOneStepInFlight) {
  Drafting loop(hashed_choice, hashed_choice, {}, kAccepts);
  const Answer answer = loop->run({1, 2, 3}, endless(41));
  EXPECT_EQ(answer.last.spec_verify_ct, 10);
  EXPECT_EQ(answer.last.spec_num_correct_drafts, 30);
  EXPECT_EQ(loop->executor().num_steps_ahead, 9);
  EXPECT_EQ(loop->executor().num_early_takes, 0);
  loop->finish();
}

// No position is at or beyond the last token's, whatever the number of right drafts.
TEST(AcceptedDrafts, HaveNoRowBeyondTheOutput) {
  for (const uint32_t period : {0u, 2u, 3u, 1000u})
    for (int64_t most = 1; most <= 16; ++most) {
      Drafting loop(hashed_choice, right_but_for(period), {}, kAccepts);
      TestLoop plain(hashed_choice);
      int64_t end = 0;
      loop->executor().on_moved = [&](const Batch& batch) {
        for (const int64_t position : batch.positions) end = std::max(end, position + 1);
      };
      expect_equal(loop->run({1, 2, 3, 1}, endless(most)), plain.run({1, 2, 3, 1}, endless(most)),
                   std::to_string(most));
      EXPECT_LT(end, 4 + most) << most;
      loop->finish();
    }
}

// The output ends at each depth of a step's drafts; the rows of the step in flight are discarded.
TEST(AcceptedDrafts, EndWithTheirSequence) {
  for (int64_t length = 1; length <= 14; ++length) {
    std::vector<int32_t> ids;
    for (int32_t i = 0; i < length; ++i) ids.push_back('a' + i % 5);
    for (const bool shares : {true, false}) {
      LoopShape shape{.page_size = 2, .reuses_prefixes = shares};
      Drafting loop(says(ids), says(ids), shape, kAccepts);
      TestLoop plain(says(ids), shape);
      for (int i = 0; i < 2; ++i) {
        const Answer answer = loop->run({1}, greedy(60));
        expect_equal(answer, plain.run({1}, greedy(60)), std::to_string(length));
        EXPECT_EQ(answer.reason(), FinishReason::kStop);
        EXPECT_EQ(std::ssize(answer.token_ids), length + 1);
      }
      EXPECT_GT(loop->executor().num_steps_ahead, 0);
      loop->finish();
    }
  }
}

TEST(AcceptedDrafts, EndAtAStopStringOrToken) {
  const auto periodic = certain_logits([](auto history) { return 'a' + (history.back() + 1) % 16; });
  Drafting loop(periodic, periodic, {}, kAccepts);
  TestLoop plain(periodic);
  for (const std::string stop : {"i", "kl", "lmn", "aj"}) {
    SamplingParams sampling = greedy(60);
    sampling.stop = {stop};
    expect_equal(loop->run({'c'}, sampling), plain.run({'c'}, sampling), stop);
  }
  for (int32_t id = 'a'; id < 'a' + 16; ++id) {
    SamplingParams sampling = greedy(40);
    sampling.stop_token_ids = {id};
    expect_equal(loop->run({'c'}, sampling), plain.run({'c'}, sampling), std::to_string(id));
  }
  EXPECT_GT(loop->executor().num_steps_ahead, 20);
  loop->finish();
}

TEST(AcceptedDrafts, ReportTheLogprobsOfTheKeptRows) {
  Drafting loop(hashed_choice, right_but_for(3), {}, kAccepts);
  LoopShape shape;
  shape.samples = true;
  TestLoop plain(hashed_choice, shape);
  SamplingParams sampling = endless(41);
  sampling.top_logprobs = 2;
  sampling.token_ids_logprob = {5, 9};
  sampling.logit_bias = {{3, 0.5f}};
  const Answer actual = loop->run({1, 2, 3}, sampling), expected = plain.run({1, 2, 3}, sampling);
  expect_equal(actual, expected, "logprobs");
  ASSERT_EQ(actual.logprobs.size(), expected.logprobs.size());
  for (size_t i = 0; i < expected.logprobs.size(); ++i) {
    EXPECT_EQ(actual.logprobs[i].chosen.token_id, expected.logprobs[i].chosen.token_id) << i;
    EXPECT_EQ(actual.logprobs[i].chosen.logprob, expected.logprobs[i].chosen.logprob) << i;
    ASSERT_EQ(actual.logprobs[i].ids.size(), 2u);
    EXPECT_EQ(actual.logprobs[i].ids[1].logprob, expected.logprobs[i].ids[1].logprob) << i;
  }
  EXPECT_GT(loop->executor().num_steps_ahead, 5);
  loop->finish();
}

// A sampled token's random number is that of its position, which depends on the drafts before it.
TEST(AcceptedDrafts, DrawTheTokensOfTheirPositions) {
  for (const uint32_t period : {0u, 2u, 5u, 1000u}) {
    Drafting loop(hashed_choice, right_but_for(period), {}, kAccepts);
    TestLoop plain(hashed_choice);
    for (uint64_t seed = 0; seed < 8; ++seed) {
      SamplingParams sampling = endless(50);
      sampling.temperature = seed % 2 == 0 ? 0.7f : 1.1f;
      sampling.top_p = seed % 3 == 0 ? 0.9f : 1;
      sampling.seed = seed;
      expect_equal(loop->run({1, 2, 3}, sampling), plain.run({1, 2, 3}, sampling), std::to_string(period));
    }
    EXPECT_GT(loop->executor().num_steps_ahead, 60) << period;
    loop->finish();
  }
}

// A request that is cancelled at its n-th token, with a step in flight, leaves its pages to the others.
TEST(AcceptedDrafts, OfACancelledRequestAreDropped) {
  for (int64_t at = 1; at <= 12; ++at) {
    Drafting loop(hashed_choice, right_but_for(4), {.num_pages = 40}, kAccepts);
    TestLoop plain(hashed_choice);
    Collector cancelled, other;
    const auto cancel = [&, collect = cancelled.callback()](const Delta& delta) {
      if (delta.completion_tokens == at) (*loop)->cancel("a");
      collect(delta);
    };
    ASSERT_TRUE((*loop)->submit({"a", {1, 2, 3}, endless(60)}, cancel).ok());
    ASSERT_TRUE((*loop)->submit({"b", {4, 5}, endless(60)}, other.callback()).ok());
    expect_equal(other.wait(), plain.run({4, 5}, endless(60)), std::to_string(at));
    cancelled.wait();
    EXPECT_GT(loop->executor().num_steps_ahead, 5);
    loop->finish();
  }
}

// A request that needs its tokens on the host makes the loop wait for them; the others' outputs are the same.
TEST(AcceptedDrafts, WaitForRequestsThatNeedTheirTokens) {
  LoopShape shape;
  const auto open = std::make_shared<std::atomic<bool>>(true);
  shape.grammars = [open] { return std::make_unique<OneTextCompiler>(open); };
  std::vector<Request> requests(5, Request{"", {1, 2, 3}, endless(41)});
  requests[0].sampling.presence_penalty = 0.25f;
  requests[1].sampling.max_new_tokens = 0;
  requests[2].routed_experts_from = 0;
  requests[3].sampling = greedy(30);
  requests[3].sampling.grammar = {GrammarSpec::Kind::kRegex, "abababab!bababab"};
  requests[4].sampling.min_new_tokens = 41;
  for (const Request& request : requests) {
    Drafting loop(hashed_choice, right_but_for(4), shape, kAccepts);
    TestLoop plain(hashed_choice, shape);
    const Answer expected = plain.run(request);
    expect_equal(loop->run(request), expected, "alone");
    EXPECT_EQ(loop->executor().num_steps_ahead, 0);
    Collector beside;
    ASSERT_TRUE((*loop)->submit({"b", {4, 5}, endless(60)}, beside.callback()).ok());
    const Answer actual = loop->run(request);
    expect_equal(actual, expected, "beside another request");
    if (expected.last.routed_experts != nullptr) {
      EXPECT_EQ(*actual.last.routed_experts, *expected.last.routed_experts);
    }
    expect_equal(beside.wait(), plain.run({4, 5}, endless(60)), "the other request");
    EXPECT_GT(loop->executor().num_steps_ahead, 0) << "while the other request runs alone";
    loop->finish();
  }
}

// With few pages the loop waits for the tokens, and retracts as without drafts.
TEST(AcceptedDrafts, NeverRetractWhileAStepIsInFlight) {
  int64_t num_retracted = 0;
  int num_ahead = 0;
  for (int64_t num_pages = 20; num_pages <= 60; num_pages += 4) {
    LoopShape shape{.num_pages = num_pages, .page_size = 2, .context_length = 40};
    Drafting loop(hashed_choice, right_but_for(5), shape, kAccepts);
    TestLoop plain(hashed_choice);
    std::vector<Collector> collectors(5);
    for (int32_t i = 0; i < 5; ++i)
      ASSERT_TRUE(
          (*loop)->submit({"", {i, 2}, endless(20 + i)}, collectors[static_cast<size_t>(i)].callback()).ok());
    for (int32_t i = 0; i < 5; ++i)
      expect_equal(collectors[static_cast<size_t>(i)].wait(), plain.run({i, 2}, endless(20 + i)),
                   std::to_string(num_pages) + " pages");
    num_ahead += loop->executor().num_steps_ahead;
    num_retracted += loop->finish().num_retracted_reqs;
  }
  EXPECT_GT(num_retracted, 5);
  EXPECT_GT(num_ahead, 50);
}

// Requests that arrive while steps are in flight are admitted at once.
TEST(AcceptedDrafts, LetOthersIn) {
  Drafting loop(hashed_choice, hashed_choice, {}, kAccepts);
  TestLoop plain(hashed_choice);
  Collector first;
  std::vector<Collector> others(6);
  const auto arrived = [](size_t i) { return numbers(static_cast<int32_t>(i), 9); };
  const auto submit_others = [&, collect = first.callback()](const Delta& delta) {
    const auto i = static_cast<size_t>(delta.completion_tokens / 8);
    if (delta.completion_tokens % 8 == 0 && i < others.size()) {
      EXPECT_TRUE((*loop)->submit({"", arrived(i), endless(10)}, others[i].callback()).ok());
    }
    collect(delta);
  };
  ASSERT_TRUE((*loop)->submit({"", {1, 2}, endless(80)}, submit_others).ok());
  for (size_t i = 1; i < others.size(); ++i)
    expect_equal(others[i].wait(), plain.run(arrived(i), endless(10)), std::to_string(i));
  expect_equal(first.wait(), plain.run({1, 2}, endless(80)), "the first");
  EXPECT_GT(loop->executor().num_steps_ahead, 8);
  loop->finish();
}

// A failure ends the running requests after the tokens of the step in flight; the next ones are served.
TEST(AcceptedDrafts, AFailureInFlightEndsTheRunningRequests) {
  for (const int64_t at : {3, 4, 5}) {
    std::atomic<int64_t> num_steps = 0;
    Drafting loop(hashed_choice, hashed_choice, {}, kAccepts, kVocab, [&](const Batch&) {
      if (++num_steps == at) throw std::runtime_error("the step fails");
    });
    TestLoop plain(hashed_choice);
    const Answer answer = loop->run({1, 2, 3}, endless(41));
    EXPECT_EQ(answer.reason(), FinishReason::kError);
    EXPECT_EQ(std::ssize(answer.token_ids), 1 + 4 * (at - 2)) << "a token, and those of the steps before";
    expect_equal(loop->run({1, 2, 3}, endless(41)), plain.run({1, 2, 3}, endless(41)), "the next request");
    loop->finish();
  }
}

// Greedy crowds with few pages, window pages, groups, chunks and shared prefixes; some requests are
// cancelled.
TEST(AcceptedDrafts, OutputsOfACrowdAreThoseWithoutDrafts) {
  int64_t num_retracted = 0, num_correct = 0;
  int num_ahead = 0;
  for (int round = 0; round < 120; ++round) {
    std::mt19937 random(static_cast<uint32_t>(round));
    LoopShape shape = crowd_shape(round, /*max_spare_pages=*/60, random);
    shape.max_model_drafts = 1 + round % 6;
    Drafting loop(hashed_choice, right_but_for(static_cast<uint32_t>(2 + round % 7)), shape, kAccepts);
    TestLoop plain(hashed_choice);
    std::vector<Request> requests;
    std::vector<Collector> collectors(14);
    for (size_t i = 0; i < collectors.size(); ++i) {
      requests.push_back(
          {"", numbers(20 + below(random, 2), 1 + below(random, 30)), endless(1 + below(random, 60))});
      Request& request = requests.back();
      request.id = std::to_string(i);
      request.sampling.temperature = i % 3 == 0 ? 0.7f : 0;
      request.sampling.seed = i;
      const bool is_cancelled = i % 5 == 4;
      const auto take = [&loop, is_cancelled, id = request.id,
                         collect = collectors[i].callback()](const Delta& delta) {
        if (is_cancelled && delta.completion_tokens == 5) (*loop)->cancel(id);
        collect(delta);
      };
      ASSERT_TRUE((*loop)->submit(request, take).ok());
    }
    for (size_t i = 0; i < collectors.size(); ++i) {
      const Answer answer = collectors[i].wait();
      if (i % 5 == 4) continue;
      expect_equal(answer, plain.run(requests[i]), "round " + std::to_string(round));
    }
    num_ahead += loop->executor().num_steps_ahead;
    const EngineStats stats = loop->finish();
    num_retracted += stats.num_retracted_reqs;
    num_correct += stats.spec_correct_drafts_total;
  }
  EXPECT_GT(num_retracted, 20);
  EXPECT_GT(num_correct, 10'000);
  EXPECT_GT(num_ahead, 2000);
}

}  // namespace
}  // namespace fp4moe
