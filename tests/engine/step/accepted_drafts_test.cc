// Drafts that the executor accepts: the next step is enqueued while the host does not know the last one's
// tokens. Outputs equal those without drafts. model_drafter_test.cc runs all its cases this way too.
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

// None, some and all drafts are right; greedy and drawn tokens.
TEST(AcceptedDrafts, ChangeNeitherTheTextNorTheUsage) {
  for (const uint32_t period : {0u, 2u, 3u, 5u, 1000u}) {
    Drafting waits(hashed_choice, right_but_for(period), {}, kWaits);
    Drafting accepts(hashed_choice, right_but_for(period), {}, kAccepts);
    LoopShape shape;
    shape.samples = true;
    TestLoop plain(hashed_choice, shape);
    for (const int64_t prompt : {1, 3, 4, 16, 33}) {
      const std::string what = std::to_string(period) + ", " + std::to_string(prompt);
      SamplingParams sampling = endless(61);
      sampling.top_logprobs = 2;
      sampling.logit_bias = {{3, 0.5f}};
      const Answer expected = waits->run(numbers(20, prompt), sampling);
      const Answer actual = accepts->run(numbers(20, prompt), sampling);
      expect_equal(actual, plain.run(numbers(20, prompt), sampling), what);
      // In the last two steps a sequence has fewer drafts, because those in flight may be right.
      const Delta& a = actual.last;
      EXPECT_EQ(a.completion_tokens, 1 + a.spec_verify_ct + a.spec_num_correct_drafts) << what;
      EXPECT_GE(a.spec_verify_ct, expected.last.spec_verify_ct) << what;
      EXPECT_LE(a.spec_verify_ct, expected.last.spec_verify_ct + 2) << what;
      EXPECT_LE(a.spec_num_proposed_drafts, expected.last.spec_num_proposed_drafts) << what;
      sampling.temperature = 0.7f;
      sampling.seed = static_cast<uint64_t>(prompt);
      expect_equal(accepts->run({1, 2}, sampling), plain.run({1, 2}, sampling), what + ", drawn");
    }
    EXPECT_EQ(waits->executor().num_steps_ahead, 0);
    EXPECT_GT(accepts->executor().num_steps_ahead, 10 * 10) << period;
    accepts->finish();
  }
}

// All steps with drafts but the first are enqueued before the tokens of the one before are known.
TEST(AcceptedDrafts, KeepOneStepInFlight) {
  Drafting loop(hashed_choice, hashed_choice, {}, kAccepts);
  EXPECT_EQ(loop->run({1, 2, 3}, endless(41)).last.spec_verify_ct, 10);
  EXPECT_EQ(loop->executor().num_steps_ahead, 9);
  EXPECT_EQ(loop->executor().num_early_takes, 0);
  loop->finish();
}

// The output ends at each depth of a step's drafts: by an end token, its length, a stop string or token. The
// rows of the step in flight are discarded.
TEST(AcceptedDrafts, EndWithTheirSequence) {
  for (int64_t length = 1; length <= 14; ++length) {
    std::vector<int32_t> ids;
    for (int32_t i = 0; i < length; ++i) ids.push_back('a' + i);
    LoopShape shape{.page_size = 2};
    Drafting ends(says(ids), says(ids), shape, kAccepts), loop(hashed_choice, hashed_choice, shape, kAccepts);
    TestLoop plain_ends(says(ids), shape), plain(hashed_choice, shape);
    const std::string what = "length " + std::to_string(length);
    for (int i = 0; i < 2; ++i) {
      const Answer answer = ends->run({1}, greedy(60));
      expect_equal(answer, plain_ends.run({1}, greedy(60)), what);
      EXPECT_EQ(answer.reason(), FinishReason::kStop);
    }
    SamplingParams sampling = greedy(60);
    sampling.stop = {std::string(1, static_cast<char>('a' + length - 1))};
    expect_equal(ends->run({1}, sampling), plain_ends.run({1}, sampling), what);
    sampling.stop = {};
    sampling.stop_token_ids = {ids.back()};
    expect_equal(ends->run({1}, sampling), plain_ends.run({1}, sampling), what);
    expect_equal(loop->run({1, 2}, endless(length)), plain.run({1, 2}, endless(length)), what);
    ends->finish();
    loop->finish();
  }
}

// A request that needs its tokens on the host makes the loop wait for them; the others' outputs are the same.
TEST(AcceptedDrafts, WaitForRequestsThatNeedTheirTokens) {
  LoopShape shape;
  const auto open = std::make_shared<std::atomic<bool>>(true);
  shape.grammars = [open] { return std::make_unique<OneTextCompiler>(open); };
  std::vector<Request> requests(4, Request{"", {1, 2, 3}, endless(41)});
  requests[0].sampling.presence_penalty = 0.25f;
  requests[1].routed_experts_from = 0;
  requests[2].sampling = greedy(30);
  requests[2].sampling.grammar = {GrammarSpec::Kind::kRegex, "abababab!bababab"};
  requests[3].sampling.min_new_tokens = 41;
  for (const Request& request : requests) {
    Drafting loop(hashed_choice, right_but_for(4), shape, kAccepts);
    TestLoop plain(hashed_choice, shape);
    const Answer expected = plain.run(request);
    expect_equal(loop->run(request), expected, "alone");
    EXPECT_EQ(loop->executor().num_steps_ahead, 0);
    Collector beside;
    // Longer than the request, if only the other one's drafts are right: then it ends alone.
    constexpr int64_t kLength = 200;
    ASSERT_TRUE((*loop)->submit({"b", {4, 5}, endless(kLength)}, beside.callback()).ok());
    const Answer actual = loop->run(request);
    expect_equal(actual, expected, "beside another request");
    if (expected.last.routed_experts != nullptr) {
      EXPECT_EQ(*actual.last.routed_experts, *expected.last.routed_experts);
    }
    expect_equal(beside.wait(), plain.run({4, 5}, endless(kLength)), "the other request");
    EXPECT_GT(loop->executor().num_steps_ahead, 0) << "while the other request runs alone";
    loop->finish();
  }
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

// Few pages, window pages, groups, chunks, shared prefixes, retracted and cancelled requests.
TEST(AcceptedDrafts, OutputsOfACrowdAreThoseWithoutDrafts) {
  int64_t num_retracted = 0, num_correct = 0, num_ahead = 0;
  for (int round = 0; round < 120; ++round) {
    std::mt19937 random(static_cast<uint32_t>(round));
    LoopShape shape = crowd_shape(round, /*max_spare_pages=*/60, random);
    shape.max_model_drafts = 1 + round % 6;
    Drafting loop(hashed_choice, right_but_for(static_cast<uint32_t>(2 + round % 7)), shape, kAccepts);
    TestLoop plain(hashed_choice);
    std::vector<Request> requests;
    std::vector<Collector> collectors(14);
    for (size_t i = 0; i < collectors.size(); ++i) {
      Request& request =
          requests.emplace_back(std::to_string(i), numbers(20 + below(random, 2), 1 + below(random, 30)),
                                endless(1 + below(random, 60)));
      request.sampling.temperature = i % 3 == 0 ? 0.7f : 0;
      request.sampling.seed = i;
      const auto take = [&, i, collect = collectors[i].callback()](const Delta& delta) {
        if (i % 5 == 4 && delta.completion_tokens == 1 + round % 9) (*loop)->cancel(std::to_string(i));
        collect(delta);
      };
      ASSERT_TRUE((*loop)->submit(request, take).ok());
    }
    for (size_t i = 0; i < collectors.size(); ++i) {
      const Answer answer = collectors[i].wait();
      if (i % 5 != 4) expect_equal(answer, plain.run(requests[i]), "round " + std::to_string(round));
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
