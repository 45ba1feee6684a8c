// The step loop with a model whose sequences have a state: prefix reuse, retraction and aborts do not change
// an output, and no slot leaks.
#include <gtest/gtest.h>

#include "engine/conversations.h"
#include "support/eventually.h"

namespace fp4moe {
namespace {

std::vector<int32_t> expected(const std::vector<int32_t>& prompt, int64_t num_tokens) {
  return expected_greedy(prompt, num_tokens, hashed_logits_and_state);
}

std::vector<int32_t> tokens(int64_t count, int32_t factor = 7) {
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < count; ++i) ids.push_back(i * factor % 13);
  return ids;
}

// Prompts of every length around a page, and chunks that do not divide it: the second time, each is reused up
// to its last whole page before the last token.
TEST(StepLoopState, AnEqualPromptContinuesFromItsLastPage) {
  for (const int page_size : {1, 3, 4})
    for (int64_t length = 1; length <= 3 * page_size + 2; ++length)
      for (const int64_t chunk : {1, 2, 5, 32}) {
        TestLoop loop(hashed_logits, {.page_size = page_size,
                                      .num_slots = 6,
                                      .scheduler = {.max_running_requests = 4,
                                                    .chunked_prefill_size = chunk,
                                                    .max_prefill_tokens = 32}});
        const std::vector<int32_t> prompt = tokens(length);
        const Answer first = loop.run(prompt, exactly(9)), again = loop.run(prompt, exactly(9));
        EXPECT_EQ(first.last.cached_tokens, 0);
        EXPECT_EQ(again.last.cached_tokens, (length - 1) / page_size * page_size)
            << page_size << " " << length;
        EXPECT_EQ(first.token_ids, expected(prompt, 9));
        EXPECT_EQ(again.token_ids, first.token_ids);
        const EngineStats stats = loop.finish();
        EXPECT_EQ(stats.num_state_slots, 5);
        if (length > page_size) {
          EXPECT_GT(stats.num_state_snapshots, 0);
        }
      }
}

// Where prompts part, the first reader of the common part leaves a snapshot; the next one continues there.
TEST(StepLoopState, ABranchGetsASnapshot) {
  TestLoop loop(hashed_logits, {.num_slots = 9});  // pages of 4
  const auto prompt = [](int32_t end) {
    std::vector<int32_t> ids = tokens(18);
    ids.insert(ids.end(), 12, end);
    return ids;
  };
  for (const int64_t cached : {0, 0, 16, 16}) {
    static int32_t end = 20;
    const Answer answer = loop.run(prompt(++end), exactly(5));
    EXPECT_EQ(answer.last.cached_tokens, cached) << end;
    EXPECT_EQ(answer.token_ids, expected(prompt(end), 5));
  }
  loop.finish();
}

// A long prompt has snapshots at whole intervals, from which one that leaves it later continues.
TEST(StepLoopState, SnapshotsAreTakenAtIntervals) {
  TestLoop loop(hashed_logits, {.num_slots = 20,
                                .scheduler = {.max_running_requests = 2,
                                              .chunked_prefill_size = 16,
                                              .max_prefill_tokens = 16,
                                              .state_interval = 8}});
  const std::vector<int32_t> prompt = tokens(60);
  EXPECT_EQ(loop.run(prompt, exactly(30)).token_ids, expected(prompt, 30));
  EXPECT_GE(loop->stats().num_state_snapshots, 10) << "the output has snapshots too";
  std::vector<int32_t> other(prompt.begin(), prompt.begin() + 45);
  other.push_back(99);
  const Answer answer = loop.run(other, exactly(5));
  EXPECT_EQ(answer.last.cached_tokens, 40);
  EXPECT_EQ(answer.token_ids, expected(other, 5));
  loop.finish();
}

// With no slot to spare there is no reuse, and with one, the sequence takes over the snapshot's slot.
TEST(StepLoopState, FewSlotsSuffice) {
  for (const int64_t num_slots : {2, 3}) {
    TestLoop loop(hashed_logits, {.num_slots = num_slots});
    const std::vector<int32_t> prompt = tokens(18);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(loop.run(prompt, exactly(6)).token_ids, expected(prompt, 6)) << i;
    std::vector<Collector> collectors(5);
    for (Collector& collector : collectors)
      ASSERT_TRUE(loop->submit({"", prompt, exactly(6)}, collector.callback()).ok());
    for (Collector& collector : collectors) EXPECT_EQ(collector.wait().token_ids, expected(prompt, 6));
    loop.finish();
  }
}

// Requests with one prompt at the same time, as those of n > 1: the first computes it, and the others
// continue from its snapshot.
TEST(StepLoopState, EqualPromptsShareASnapshot) {
  TestLoop loop(hashed_logits, {.num_slots = 20});
  const std::vector<int32_t> prompt = tokens(41);
  std::vector<Collector> collectors(5);
  for (Collector& collector : collectors)
    ASSERT_TRUE(loop->submit({"", prompt, exactly(6)}, collector.callback()).ok());
  int64_t num_cached = 0;
  for (Collector& collector : collectors) {
    EXPECT_EQ(collector.wait().token_ids, expected(prompt, 6));
    num_cached += collector.wait().last.cached_tokens;
  }
  EXPECT_EQ(num_cached, 4 * 40);
  loop.finish();
}

// After a failed step, nothing of its snapshots is used.
TEST(StepLoopState, AFailedStepLeavesNoSnapshot) {
  int num_steps = 0;
  TestLoop loop(hashed_logits, {.num_slots = 20}, [&](const Batch&) {
    if (++num_steps == 4) throw std::runtime_error("a step fails");
  });
  const std::vector<int32_t> prompt = tokens(18);
  EXPECT_EQ(loop.run(prompt, exactly(8)).reason(), FinishReason::kError);
  EXPECT_TRUE(eventually([&] { return loop->stats().num_state_snapshots == 0; }));
  for (int i = 0; i < 2; ++i) EXPECT_EQ(loop.run(prompt, exactly(8)).token_ids, expected(prompt, 8));
  loop.finish();
}

// Few pages and few slots in 1 to 3 groups.
LoopShape random_shape(int round, std::mt19937& random) {
  const auto below = [&](int n) { return fp4moe::below(random, n); };
  LoopShape shape{.page_size = 1 + round % 5,
                  .num_slots = 2 + below(16),
                  .scheduler = {.max_running_requests = 1 + below(8),
                                .chunked_prefill_size = 1 + below(12),
                                .max_prefill_tokens = 1 + below(20),
                                .state_interval = 1 + below(20)},
                  .context_length = 100,
                  .num_groups = 1 + round % 3,
                  .reuses_prefixes = round % 8 != 7};
  shape.num_pages = (100 + shape.page_size - 1) / shape.page_size + below(12);
  return shape;
}

// Conversations with few pages and few slots, several groups, both kinds of executor, and cancelled requests.
// Every output depends only on its own history.
TEST(StepLoopState, ConversationsAreThoseOfEachAlone) {
  std::mt19937 random(11);
  const auto below = [&](int n) { return fp4moe::below(random, n); };
  int64_t num_cached = 0, num_retracted = 0;
  for (int round = 0; round < 48; ++round) {
    LoopShape shape = random_shape(round, random);
    shape.samples = round % 2 == 1 && round % 3 == 0;
    TestLoop loop(hashed_logits, shape);
    const std::vector<int32_t> system(static_cast<size_t>(below(20)), 200);
    run_conversations(loop, std::vector<std::vector<int32_t>>(8, system), random, expected,
                      "round " + std::to_string(round));
    const EngineStats stats = loop.finish();
    num_cached += stats.cached_tokens_total;
    num_retracted += stats.num_retracted_reqs;
  }
  EXPECT_GT(num_cached, 1000);
  EXPECT_GT(num_retracted, 0);
}

// The logits of the model with a state, but after a third of the histories another token is the best.
void often_right_logits(std::span<const int32_t> history, std::span<float> logits) {
  hashed_logits_and_state(history, logits);
  if (history.size() % 3 == 1) std::ranges::reverse(logits);
}

// Who drafts: a source on either kind of executor, or a draft model whose drafts stay on the executor until a
// step has verified them, as on a GPU.
enum class Drafter { kSourceOnHost, kSource, kTokens, kFeatures, kFeaturesAhead };

class DraftedLoop {
 public:
  DraftedLoop(LoopShape shape, Drafter who)
      : tokens_(fake_config(kVocab), often_right_logits),
        features_(fake_config(kVocab), often_right_logits, static_cast<size_t>(shape.num_groups)) {
    constexpr int64_t kDrafts = 4;
    shape.samples = who != Drafter::kSourceOnHost;
    if (who == Drafter::kSourceOnHost || who == Drafter::kSource) {
      shape.drafts = {.max_tokens = kDrafts, .min_match = 1, .max_match = 4};
      shape.draft_source = [](std::span<const int32_t> ids, int64_t max_tokens) {
        return expected_greedy({ids.begin(), ids.end()}, max_tokens, often_right_logits);
      };
    } else {
      shape.keeps_draft_ids = true;
      shape.max_model_drafts = kDrafts;
      shape.num_cheap_draft_rows = who == Drafter::kFeaturesAhead ? 1000 : 0;
      features_.runs_ahead = who == Drafter::kFeaturesAhead;
      shape.draft.model = who == Drafter::kTokens ? static_cast<Model*>(&tokens_) : &features_;
    }
    loop_ = std::make_unique<TestLoop>(hashed_logits, shape);
  }
  TestLoop& operator*() { return *loop_; }

 private:
  FakeModel tokens_;
  FakeFeatureDraft features_;
  std::unique_ptr<TestLoop> loop_;
};

// The same with drafts: the replayed rows of every step are the right ones, whoever drafts.
TEST(StepLoopState, DraftsChangeNoOutput) {
  std::mt19937 random(23);
  const auto below = [&](int n) { return fp4moe::below(random, n); };
  for (const Drafter who : {Drafter::kSourceOnHost, Drafter::kSource, Drafter::kTokens, Drafter::kFeatures,
                            Drafter::kFeaturesAhead}) {
    int64_t num_cached = 0, num_retracted = 0, num_correct = 0, num_wrong = 0;
    for (int round = 0; round < 24; ++round) {
      DraftedLoop loop(random_shape(round, random), who);
      const std::vector<int32_t> system(static_cast<size_t>(below(20)), 200);
      run_conversations(
          *loop, std::vector<std::vector<int32_t>>(8, system), random, expected,
          "drafter " + std::to_string(static_cast<int>(who)) + ", round " + std::to_string(round));
      const EngineStats stats = (*loop).finish();
      num_cached += stats.cached_tokens_total;
      num_retracted += stats.num_retracted_reqs;
      num_correct += stats.spec_correct_drafts_total;
      num_wrong += stats.spec_proposed_drafts_total - stats.spec_correct_drafts_total;
    }
    EXPECT_GT(num_cached, 300) << static_cast<int>(who);
    EXPECT_GT(num_retracted, 0) << static_cast<int>(who);
    EXPECT_GT(num_correct, 500) << static_cast<int>(who);
    EXPECT_GT(num_wrong, 500) << static_cast<int>(who);
  }
}

TEST(StepLoopState, CancelledStreamsWithDraftsLeakNoSlot) {
  std::mt19937 random(29);
  for (const Drafter who : {Drafter::kSource, Drafter::kFeaturesAhead}) {
    DraftedLoop loop({.num_pages = 90,
                      .page_size = 3,
                      .num_slots = 30,
                      .scheduler = {.max_running_requests = 24,
                                    .chunked_prefill_size = 7,
                                    .max_prefill_tokens = 40,
                                    .state_interval = 9},
                      .context_length = 100,
                      .num_groups = 2},
                     who);
    run_cancelled_streams(*loop, random, expected);
    const EngineStats stats = (*loop).finish();
    EXPECT_GT(stats.num_aborted_requests_total, 10);
    EXPECT_GT(stats.spec_correct_drafts_total, 100);
    EXPECT_EQ(stats.num_used_state_slots, 0);
    EXPECT_EQ(stats.num_leaked_pages, 0);
  }
}

// 64 streams, cancelled at random times, leak no slot and no page.
TEST(StepLoopState, CancelledStreamsLeakNoSlot) {
  std::mt19937 random(17);
  for (const bool samples : {false, true}) {
    const LoopShape shape{.num_pages = 90,
                          .page_size = 3,
                          .num_slots = 30,
                          .scheduler = {.max_running_requests = 24,
                                        .chunked_prefill_size = 7,
                                        .max_prefill_tokens = 40,
                                        .state_interval = 9},
                          .context_length = 100,
                          .num_groups = 2,
                          .samples = samples};
    TestLoop loop(hashed_logits, shape);
    run_cancelled_streams(loop, random, expected);
    const EngineStats stats = loop.finish();
    EXPECT_GT(stats.num_aborted_requests_total, 10);
    EXPECT_GT(stats.cached_tokens_total, 100);
    EXPECT_EQ(stats.num_state_slots, 2 * 29);
    EXPECT_TRUE(loop->flush_cache().ok());
    EXPECT_TRUE(eventually([&] { return loop->stats().num_state_snapshots == 0; }));
    EXPECT_EQ(loop->stats().num_free_pages, stats.num_pages);
  }
}

}  // namespace
}  // namespace fp4moe
