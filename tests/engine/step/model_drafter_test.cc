// Drafts by a fake model. A draft model with the target's function is right exactly if its pages hold what
// the drafter promises, so most tests expect every draft to be correct.
#include "engine/step/model_drafter.h"

#include <gtest/gtest.h>

#include <random>

#include "engine/crowd_shape.h"
#include "engine/drafting_loop.h"
#include "engine/fake_grammar.h"

namespace fp4moe {
namespace {

class ModelDraft : public ::testing::TestWithParam<Way> {};
INSTANTIATE_TEST_SUITE_P(Ways, ModelDraft,
                         ::testing::Values(Way{}, Way{.are_kept = true}, Way{.takes_features = true},
                                           Way{.takes_features = true, .are_kept = true},
                                           Way{.takes_features = true, .are_kept = true, .most_ahead = 1000},
                                           Way{.takes_features = true, .are_kept = true, .most_ahead = 10},
                                           Way{true, true, 1000, true}, Way{true, true, 10, true}),
                         [](const auto& way) {
                           return std::string(way.param.takes_features ? "Features" : "Tokens") +
                                  (way.param.are_kept ? "Kept" : "") +
                                  (way.param.most_ahead > 0 ? std::to_string(way.param.most_ahead) : "") +
                                  (way.param.are_accepted ? "Accepted" : "");
                         });

TEST_P(ModelDraft, OfTheTargetsFunctionIsAlwaysRight) {
  for (const int64_t prompt : {1, 2, 15, 16, 17, 33, 60}) {
    Drafting loop(hashed_choice, hashed_choice, {}, GetParam());
    const Answer answer = loop->run(numbers(20, prompt), endless(41));
    EXPECT_EQ(answer.last.spec_verify_ct, 10) << prompt << ": the first token, then 4 in each step";
    EXPECT_EQ(answer.last.spec_num_correct_drafts, 30) << prompt;
    TestLoop plain(hashed_choice);
    EXPECT_EQ(answer.token_ids, plain.run(numbers(20, prompt), endless(41)).token_ids);
    loop->finish();
  }
}

class ExecutorDraft : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(TakesFeatures, ExecutorDraft, ::testing::Bool());

// On the host, on the executor, on it and left there, or there and before the tokens are known.
TEST_P(ExecutorDraft, IsTheSameWhereverItIsChosen) {
  LoopShape shape;
  for (const float temperature : {0.0f, 0.7f}) {
    SamplingParams sampling = endless(41);
    sampling.temperature = temperature;
    sampling.seed = 3;
    Answer answers[4];
    for (size_t i = 0; i < 4; ++i) {
      shape.samples = i > 0;
      const Way way{.takes_features = GetParam(), .are_kept = i > 1, .most_ahead = i > 2 ? 64 : 0};
      Drafting loop(hashed_choice, hashed_choice, shape, way);
      answers[i] = loop->run(numbers(20, 33), sampling);
      EXPECT_EQ(loop->executor().num_early_takes, 0);
      loop->finish();
    }
    for (size_t i = 1; i < 4; ++i) {
      EXPECT_EQ(answers[0].token_ids, answers[i].token_ids);
      EXPECT_EQ(answers[0].last.spec_num_correct_drafts, answers[i].last.spec_num_correct_drafts);
      EXPECT_EQ(answers[0].last.spec_verify_ct, answers[i].last.spec_verify_ct);
      EXPECT_GE(answers[i].last.spec_num_correct_drafts, temperature == 0 ? 30 : 10);
    }
  }
}

// A draft's number of rows, and no row at or beyond the request's last token.
TEST_P(ModelDraft, HasNoRowBeyondTheOutput) {
  for (int64_t most = 1; most <= 12; ++most) {
    Drafting loop(hashed_choice, hashed_choice, {}, GetParam());
    int64_t end = 0;
    loop->executor().on_moved = [&](const Batch& batch) {
      for (const int64_t position : batch.positions) end = std::max(end, position + 1);
    };
    EXPECT_EQ(loop->run({1, 2, 3, 1}, endless(most)).last.completion_tokens, most);
    loop->finish();  // its thread no longer writes `end`
    EXPECT_LT(end, 4 + most) << most;
  }
}

TEST_P(ModelDraft, WrongDraftsChangeNothing) {
  const auto wrong = certain_logits([](auto history) { return history.back() % 3 + 40; });
  Drafting loop(hashed_choice, wrong, {}, GetParam());
  TestLoop plain(hashed_choice);
  for (const float temperature : {0.0f, 0.7f}) {
    SamplingParams sampling = endless(60);
    sampling.temperature = temperature;
    sampling.seed = 5;
    const Answer answer = loop->run({1, 2, 3}, sampling);
    EXPECT_EQ(answer.token_ids, plain.run({1, 2, 3}, sampling).token_ids);
    EXPECT_GT(answer.last.spec_num_proposed_drafts, 100);
    EXPECT_LT(answer.last.spec_num_correct_drafts, 20);
  }
  loop->finish();
}

// Runs a draft model that is always right, but at lengths that `period` divides has the logit `last` for id
// 280. The drafts end there: at first, or after some drafts of a chain.
void expect_drafts_end(float last, size_t period, const Way& way) {
  const auto draft = [=](std::span<const int32_t> history, std::span<float> logits) {
    hashed_choice(history, logits);
    if (history.size() % period == 0) logits[280] = last;
  };
  Drafting loop(hashed_choice, draft, {}, way);
  TestLoop plain(hashed_choice);
  const Answer answer = loop->run({1, 2}, endless(50));
  EXPECT_EQ(answer.token_ids, plain.run({1, 2}, endless(50)).token_ids);
  EXPECT_EQ(answer.last.spec_num_correct_drafts, answer.last.spec_num_proposed_drafts);
  EXPECT_EQ(answer.last.spec_num_proposed_drafts > 0, period > 1);
  loop->finish();
}

TEST_P(ModelDraft, EndsAtALogitThatIsNotFinite) {
  for (const float bad : {std::nanf(""), INFINITY, -INFINITY})
    for (const size_t period : {1u, 3u}) expect_drafts_end(bad, period, GetParam());
}

// Id 280 has no token, so a draft of it could only be wrong.
TEST_P(ModelDraft, EndsAtAnIdWithoutAToken) {
  for (const size_t period : {1u, 3u}) expect_drafts_end(100, period, GetParam());
}

// Positions from max_positions on have no draft rows; the output goes on.
TEST_P(ModelDraft, EndsAtItsContext) {
  LoopShape shape;
  shape.draft.shape.max_positions = 30;
  Drafting loop(hashed_choice, hashed_choice, shape, GetParam());
  TestLoop plain(hashed_choice);
  const Answer answer = loop->run({1, 2, 3, 4}, endless(60));
  EXPECT_EQ(answer.token_ids, plain.run({1, 2, 3, 4}, endless(60)).token_ids);
  EXPECT_GE(answer.last.spec_num_correct_drafts, 18);
  EXPECT_LE(answer.last.spec_num_correct_drafts, 27);
  EXPECT_EQ(answer.last.spec_num_correct_drafts, answer.last.spec_num_proposed_drafts);
  loop->run(numbers(1, 40), endless(9));
  loop->finish();
}

// An id that the draft model lacks ends the drafts of its sequence only.
TEST(ModelDrafter, AVocabularySmallerThanTheTargetsDraftsForItsOwnIds) {
  LoopShape shape;
  Drafting loop(hashed_choice, hashed_choice, shape, Way{}, /*draft_vocab=*/50);
  TestLoop plain(hashed_choice);
  for (const int32_t id : {49, 50, 299}) {
    const Answer answer = loop->run({1, id, 2}, endless(41));
    EXPECT_EQ(answer.token_ids, plain.run({1, id, 2}, endless(41)).token_ids);
    EXPECT_EQ(answer.last.spec_num_correct_drafts, id == 49 ? 30 : 0) << id;
  }
  loop->finish();
}

// A draft model may have more ids than the target, which are then no drafts.
TEST_P(ModelDraft, AnIdThatTheTargetLacksIsNoDraft) {
  const auto foreign = certain_logits([](auto) { return 305; });
  Drafting loop(hashed_choice, foreign, {}, GetParam(), /*draft_vocab=*/310);
  EXPECT_EQ(loop->run({1, 2}, endless(20)).last.spec_num_proposed_drafts, 0);
  loop->finish();
}

TEST(ModelDrafter, TokenIdsOfThePartialVocabularyAreMapped) {
  const auto next = [](std::span<const int32_t> history) { return (history.back() + 7) % 64; };
  // Draft id i is the target's id 63 - i.
  const auto draft = certain_logits([next](auto history) { return 63 - next(history); });
  Drafting loop(certain_logits(next), draft, {}, Way{.takes_features = true}, /*draft_vocab=*/64);
  for (int32_t id = 63; id >= 0; --id) loop.features().ids.push_back(id);
  const Answer answer = loop->run({1, 2}, endless(41));
  EXPECT_EQ(answer.last.spec_num_correct_drafts, 30);
  loop->finish();
}

// In a tie the draft is the lowest id.
TEST_P(ModelDraft, ATieIsDecidedForTheLowestId) {
  const auto all_equal = [](std::span<const int32_t>, std::span<float> logits) {
    std::ranges::fill(logits, 0.5f);
  };
  Drafting loop(certain_logits([](auto) { return 0; }), all_equal, {}, GetParam());
  EXPECT_EQ(loop->run({1, 2}, endless(41)).last.spec_num_correct_drafts, 30);
  loop->finish();
}

// The draft model does not know the grammar: its drafts end at the first that the grammar refuses.
TEST_P(ModelDraft, GrammarsAndRoutedExpertsFollowTheKeptDrafts) {
  LoopShape shape;
  const auto open = std::make_shared<std::atomic<bool>>(true);
  shape.grammars = [open] { return std::make_unique<OneTextCompiler>(open); };
  const std::string text = "abababab!bababab";
  const auto next = certain_logits([](auto history) { return history.back() == 'a' ? 'b' : 'a'; });
  Drafting loop(hashed_choice, next, shape, GetParam());
  TestLoop plain(hashed_choice, shape);
  Request request{"", {1, 2}, endless(30)};
  request.routed_experts_from = 0;
  const Answer drafted = loop->run(request), expected = plain.run(request);
  EXPECT_EQ(drafted.token_ids, expected.token_ids);
  EXPECT_EQ(*drafted.last.routed_experts, *expected.last.routed_experts);
  EXPECT_GT(drafted.last.spec_num_proposed_drafts, 0);
  request.sampling = greedy(30);
  request.sampling.grammar = {GrammarSpec::Kind::kRegex, text};
  const Answer without = plain.run(request);
  int64_t most_correct = 0;  // of several tries: on a busy machine, masks may be too late for a step's drafts
  for (int i = 0; i < 20 && most_correct <= 5; ++i) {
    const Answer constrained = loop->run(request);
    EXPECT_EQ(constrained.text, text);
    EXPECT_EQ(*constrained.last.routed_experts, *without.last.routed_experts);
    most_correct = std::max(most_correct, constrained.last.spec_num_correct_drafts);
  }
  EXPECT_GT(most_correct, 5);
  loop->finish();
}

// A penalty needs the drafts before a row on the host; nothing else does, so that the host waits once a step.
TEST(ModelDrafter, TheHostTakesKeptIdsEarlyOnlyForPenalties) {
  for (const bool has_penalty : {false, true}) {
    Drafting loop(hashed_choice, hashed_choice, {}, Way{.takes_features = true, .are_kept = true});
    TestLoop plain(hashed_choice);
    SamplingParams sampling = endless(41);
    sampling.logit_bias = {{3, 0.5f}};
    if (has_penalty) sampling.presence_penalty = 0.25f;
    const Answer answer = loop->run({1, 2, 3}, sampling);
    EXPECT_EQ(answer.token_ids, plain.run({1, 2, 3}, sampling).token_ids);
    EXPECT_EQ(loop->executor().num_early_takes, has_penalty ? answer.last.spec_verify_ct : 0);
    EXPECT_GT(answer.last.spec_num_correct_drafts, 10);
    loop->finish();
  }
}

constexpr Way kAhead{.takes_features = true, .are_kept = true, .most_ahead = 64};

// In a steady state, a pass extends all rows of a step before its tokens are known, and each other draft has
// a chained pass.
TEST(ModelDrafter, RunsAheadOfSmallStepsThatOnlyDecode) {
  for (const int64_t most_ahead : {0, 3, 4, 64}) {
    Way way = kAhead;
    way.most_ahead = most_ahead;
    Drafting loop(hashed_choice, hashed_choice, {}, way);
    int64_t num_ahead = 0, num_passes = 0;
    loop->executor().on_draft = [&](std::span<const Batch> groups) {
      ++num_passes;
      if (!FakeExecutor::is_ahead(groups)) return;
      ++num_ahead;
      for (size_t row = 0; row < groups[0].token_ids.size(); ++row)
        EXPECT_EQ(groups[0].token_ids[row], ~static_cast<int32_t>(row));
    };
    const Answer answer = loop->run({1, 2, 3}, endless(41));
    loop->finish();
    EXPECT_EQ(answer.last.spec_verify_ct, 10);
    EXPECT_EQ(num_ahead, most_ahead >= 4 ? 10 : 0);
    // After the prompt and after each step but the last one; the last extension ahead is in vain.
    EXPECT_EQ(num_passes, 10 * kDrafts + (most_ahead >= 4));
  }
}

TEST(ModelDrafter, DoesNotRunAheadOfAGrammarsRows) {
  LoopShape shape;
  const auto open = std::make_shared<std::atomic<bool>>(true);
  shape.grammars = [open] { return std::make_unique<OneTextCompiler>(open); };
  const auto next = certain_logits([](auto history) { return history.back() == 'a' ? 'b' : 'a'; });
  Drafting loop(hashed_choice, next, shape, kAhead);
  loop->executor().on_draft = [&](std::span<const Batch> groups) {
    EXPECT_FALSE(FakeExecutor::is_ahead(groups));
  };
  SamplingParams sampling = greedy(30);
  sampling.grammar = {GrammarSpec::Kind::kRegex, "abababab!bababab"};
  EXPECT_EQ(loop->run({1, 2}, sampling).text, "abababab!bababab");
  loop->finish();
}

// The tokens of the step are delivered before the failure ends the running requests.
TEST(ModelDrafter, AFailureAheadEndsTheRunningRequests) {
  Drafting loop(hashed_choice, hashed_choice, {}, kAhead);
  loop->executor().num_failures_ahead = 2;
  for (int i = 0; i < 2; ++i) {
    const Answer answer = loop->run({1, 2, 3}, endless(41));
    EXPECT_EQ(answer.reason(), FinishReason::kError);
    EXPECT_NE(answer.last.error.find("no memory ahead"), std::string::npos) << answer.last.error;
    EXPECT_EQ(answer.token_ids.size(), 5u) << "the first one, and those of a step";
  }
  EXPECT_EQ(loop->run({1, 2, 3}, endless(41)).last.spec_num_correct_drafts, 30);
  loop->finish();
}

// The adaptive choice needs the time of the passes, for which the host waits now and then.
TEST(ModelDrafter, AnAdaptiveChoiceTakesFewKeptIdsEarly) {
  for (const Way& way : {Way{.are_kept = true}, kAhead}) {
    LoopShape shape;
    shape.adaptive = StepCost{};
    Drafting loop(hashed_choice, hashed_choice, shape, way);
    int64_t num_passes = 0;  // at least one for each call of draft() that has drafts
    loop->executor().on_draft = [&](std::span<const Batch>) { ++num_passes; };
    for (int32_t i = 0; i < 4; ++i) loop->run({1, 2, i}, endless(120));
    loop->finish();
    EXPECT_GE(loop->executor().num_early_takes, 1);
    EXPECT_LE(loop->executor().num_early_takes, 1 + num_passes / 16);
  }
}

// With a synthetic acceptance the draft decides the token, on the device too.
TEST_P(ModelDraft, SyntheticAcceptanceDecidesWhatIsKept) {
  for (const double acceptance : {0.0, 1.0}) {
    LoopShape shape;
    shape.synthetic_acceptance = acceptance;
    const auto wrong = certain_logits([](auto history) { return history.back() % 3 + 40; });
    Drafting loop(hashed_choice, wrong, shape, GetParam());
    SamplingParams sampling = endless(41);
    sampling.logit_bias = {{40, -0.5f}, {41, 0.5f}};
    const Answer answer = loop->run({1, 2, 3}, sampling);
    EXPECT_GT(answer.last.spec_num_proposed_drafts, 20);
    EXPECT_EQ(answer.last.spec_num_correct_drafts, acceptance == 0 ? 0 : 30);
    EXPECT_EQ(loop->executor().num_early_takes, 0);
    loop->finish();
  }
}

// A pass that fails ends the running requests; the next ones are served.
TEST_P(ModelDraft, AFailedPassEndsTheRunningRequests) {
  Drafting loop(hashed_choice, hashed_choice, {}, GetParam());
  loop->executor().draft_failure = does_not_fit("no memory for the draft");
  const Answer answer = loop->run({1, 2}, endless(20));
  EXPECT_EQ(answer.reason(), FinishReason::kError);
  EXPECT_NE(answer.last.error.find("no memory for the draft"), std::string::npos);
  loop->finish();
}

// A draft model with a small batch extends a prompt in several passes. (One that takes features gets the rows
// of one pass of the target, which has the same limit.)
TEST(ModelDrafter, ExtendsInPassesOfAtMostItsBatch) {
  LoopShape shape;
  shape.draft.shape.max_batch_tokens = 8;
  Drafting loop(hashed_choice, hashed_choice, shape);
  EXPECT_EQ(loop->run(numbers(20, 60), endless(41)).last.spec_num_correct_drafts, 30);
  loop->finish();
}

// A prefix's pages hold the draft's part as well, even if the request before ended with its prompt's last
// step, which filled four pages.
TEST_P(ModelDraft, ReusedPagesHoldItsKeys) {
  for (const int64_t first_output : {1, 2, 30}) {
    Drafting loop(hashed_choice, hashed_choice, {}, GetParam());
    loop->run(numbers(20, 48), endless(first_output));
    std::vector<int32_t> longer = numbers(20, 48);
    longer.insert(longer.end(), {7, 8, 9});
    const Answer answer = loop->run(longer, endless(41));
    EXPECT_GE(answer.last.cached_tokens, 48);
    EXPECT_EQ(answer.last.spec_verify_ct, 10) << first_output;
    EXPECT_EQ(answer.last.spec_num_correct_drafts, 30) << first_output;
    loop->finish();
  }
}

// A request alone in a pool that just holds it: drafts stop at the last page, the output does not.
TEST_P(ModelDraft, TakesOnlyPagesToSpare) {
  for (const int64_t num_pages : {8, 9, 10}) {
    LoopShape shape{.num_pages = num_pages, .context_length = 32};
    Drafting loop(hashed_choice, hashed_choice, shape, GetParam());
    TestLoop plain(hashed_choice);
    const Answer answer = loop->run({1, 2, 3}, endless(29));
    EXPECT_EQ(answer.token_ids, plain.run({1, 2, 3}, endless(29)).token_ids);
    EXPECT_GT(answer.last.spec_num_correct_drafts, 10);
    EXPECT_EQ(answer.last.spec_num_correct_drafts, answer.last.spec_num_proposed_drafts);
    loop->finish();
  }
}

// ---- crowds ---------------------------------------------------------------------------------------

struct CrowdRun {
  std::vector<std::vector<int32_t>> outputs;
  EngineStats stats;
};

// Requests with common prefixes and with equal prompts, greedy or (every third, if `samples`) sampled; some
// have a twin that is cancelled at its third token.
class DraftedCrowd {
 public:
  DraftedCrowd(int round, bool samples) : random_(static_cast<uint32_t>(round)) {
    shape_ = crowd_shape(round, /*max_spare_pages=*/40, random_);
    for (int i = 0; i < 12; ++i) {
      Request request{"", numbers(20 + below(2), 1 + below(30)), endless(1 + below(60))};
      if (samples && i % 3 == 0) request.sampling.temperature = 0.7f;
      request.sampling.seed = below(1000);
      if (samples && i % 4 == 1) request.sampling.frequency_penalty = 0.25f;
      requests_.push_back(request);
    }
  }

  CrowdRun run(int64_t max_drafts, Way way) {
    shape_.max_model_drafts = max_drafts;
    if (max_drafts > 0) {
      Drafting loop(hashed_choice, hashed_choice, shape_, way);
      return run_in(*loop);
    }
    TestLoop loop(hashed_choice, shape_);
    return run_in(loop);
  }

 private:
  int below(int n) { return fp4moe::below(random_, n); }

  CrowdRun run_in(TestLoop& loop) {
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
    CrowdRun run;
    for (Collector& collector : collectors) run.outputs.push_back(collector.wait().token_ids);
    run.stats = loop.finish();
    return run;
  }

  std::mt19937 random_;
  LoopShape shape_;
  std::vector<Request> requests_;
};

// Few pages, window pages, groups, chunks, retracted and cancelled requests, shared and reused pages.
TEST_P(ModelDraft, OutputsOfACrowdAreThoseWithoutDrafts) {
  int64_t num_retracted = 0, num_proposed = 0, num_verified = 0, num_cached = 0;
  for (int round = 0; round < 96; ++round) {
    const bool samples = round % 2 == 0;
    DraftedCrowd crowd(round, samples);
    const CrowdRun plain = crowd.run(0, GetParam()), drafted = crowd.run(1 + round % 6, GetParam());
    EXPECT_EQ(drafted.outputs, plain.outputs) << "round " << round;
    const EngineStats& stats = drafted.stats;
    // A cancelled request's last drafts are not delivered.
    const int64_t num_lost = stats.num_aborted_requests_total * (1 + round % 6);
    if (!samples) {
      EXPECT_GE(stats.spec_correct_drafts_total + num_lost, stats.spec_proposed_drafts_total) << round;
    }
    num_retracted += stats.num_retracted_reqs;
    num_proposed += stats.spec_proposed_drafts_total;
    num_verified += stats.spec_verify_calls_total;
    num_cached += stats.cached_tokens_total;
  }
  EXPECT_GT(num_retracted, 0);
  EXPECT_GT(num_cached, 1000);
  EXPECT_GT(num_proposed, 2 * num_verified);
}

}  // namespace
}  // namespace fp4moe
