// The step loop with shared prefixes: it reuses them, and outputs do not change.
#include <gtest/gtest.h>

#include "engine/conversations.h"

namespace fp4moe {
namespace {

// Layer 1 has a window and pages of its own: those that one sequence needs, and `surplus` more.
void use_window(LoopShape& shape, int64_t window, int64_t surplus) {
  shape.window = window;
  shape.num_window_pages =
      std::min(KvWindow{window, shape.page_size}.most_pages(1) + surplus, shape.num_pages);
}

// Prompts longer than several windows, cut at odd places: the second time each is reused up to its last whole
// page, and the outputs are those of the first time.
TEST(StepLoopReuse, AWindowIsReusedAtTheEndOfAPrompt) {
  for (const int page_size : {1, 3, 4})
    for (const int64_t window : {1, 2, 4, 5, 11})
      for (const int64_t chunk : {1, 5, 7, 32}) {
        LoopShape shape{
            .page_size = page_size,
            .scheduler = {
                .max_running_requests = 4, .chunked_prefill_size = chunk, .max_prefill_tokens = 32}};
        use_window(shape, window, 60);
        TestLoop loop(hashed_logits, shape);
        std::vector<int32_t> prompt;
        for (int32_t i = 0; i < 61; ++i) prompt.push_back(i * 7 % 13);
        const Answer first = loop.run(prompt, exactly(9)), again = loop.run(prompt, exactly(9));
        EXPECT_EQ(first.last.cached_tokens, 0);
        EXPECT_EQ(again.last.cached_tokens, 60 / page_size * page_size) << page_size << " " << window;
        EXPECT_EQ(first.token_ids, expected_greedy(prompt, 9));
        EXPECT_EQ(again.token_ids, first.token_ids);
        loop.finish();
      }
}

TEST(StepLoopReuse, CachedTokensAreCounted) {
  TestLoop loop;  // pages of 4
  const std::vector<int32_t> prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  const Answer first = loop.run(prompt, exactly(4)), again = loop.run(prompt, exactly(4));
  EXPECT_EQ(first.last.cached_tokens, 0);
  EXPECT_EQ(again.last.cached_tokens, 8);
  EXPECT_EQ(again.last.prompt_tokens, 9);
  EXPECT_EQ(again.token_ids, first.token_ids);
  std::vector<int32_t> turn = prompt;  // plus the output, whose last token was never computed
  turn.insert(turn.end(), first.token_ids.begin(), first.token_ids.end());
  turn.push_back(50);
  const Answer next = loop.run(turn, exactly(4));
  EXPECT_EQ(next.last.cached_tokens, 12);
  EXPECT_EQ(next.token_ids, expected_greedy(turn, 4));
  const EngineStats stats = loop.finish();
  EXPECT_EQ(stats.prompt_tokens_total, 9 + 9 + 14);
  EXPECT_EQ(stats.cached_tokens_total, 8 + 12);
  EXPECT_NEAR(stats.cache_hit_rate, 12.0 / 14, 1e-9);
  EXPECT_GT(stats.num_cached_pages, 0);
}

TEST(StepLoopReuse, WithoutItEveryPromptIsComputed) {
  TestLoop loop(hashed_logits, {.reuses_prefixes = false});
  const std::vector<int32_t> prompt(20, 7);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(loop.run(prompt, exactly(4)).last.cached_tokens, 0);
  EXPECT_EQ(loop.finish().num_cached_pages, 0);
}

TEST(StepLoopReuse, AFlushForgetsAndIsRefusedWhileRequestsRun) {
  Gate gate;
  TestLoop loop(hashed_logits, {}, gate.hook());
  Collector running;
  ASSERT_TRUE(loop->submit({"", std::vector<int32_t>(9, 7), exactly(4)}, running.callback()).ok());
  gate.wait_until_reached();
  const Status refused = loop->flush_cache();
  EXPECT_EQ(refused.code(), StatusCode::kUnavailable);
  gate.open();
  running.wait();
  EXPECT_TRUE(loop->flush_cache().ok());
  EXPECT_EQ(loop->stats().num_cached_pages, 0);
  EXPECT_EQ(loop.run(std::vector<int32_t>(9, 7), exactly(4)).last.cached_tokens, 0);
  EXPECT_EQ(loop.run(std::vector<int32_t>(9, 7), exactly(4)).last.cached_tokens, 8);
  loop.finish();
}

// After bad logits, a prompt is computed again from the start.
TEST(StepLoopReuse, NothingOfAFailedRequestIsReused) {
  int num_asked = 0;
  TestLoop loop([&](std::span<const int32_t> history, std::span<float> logits) {
    hashed_logits(history, logits);
    if (++num_asked == 1) logits[3] = std::nanf("");
  });
  const std::vector<int32_t> prompt(9, 7);
  EXPECT_EQ(loop.run(prompt, exactly(4)).reason(), FinishReason::kError);
  const Answer again = loop.run(prompt, exactly(4));
  EXPECT_EQ(again.last.cached_tokens, 0);
  EXPECT_EQ(again.token_ids, expected_greedy(prompt, 4));
  loop.finish();
}

// Conversations with few pages, several groups, both kinds of executor, and cancelled requests. Each turn
// contains the previous turn's prompt and output. Every output depends only on its own history.
TEST(StepLoopReuse, ConversationsAreThoseOfEachAlone) {
  std::mt19937 random(11);
  const auto below = [&](int n) { return fp4moe::below(random, n); };
  int64_t num_cached = 0, num_retracted = 0, num_cached_with_window = 0;
  for (int round = 0; round < 32; ++round) {
    LoopShape shape{.page_size = 1 + round % 5,
                    .scheduler = {.max_running_requests = 1 + below(8),
                                  .chunked_prefill_size = 1 + below(12),
                                  .max_prefill_tokens = 1 + below(20)},
                    .context_length = 100,
                    .num_groups = 1 + round % 3,
                    .samples = round % 2 == 1 && round % 3 == 0};
    shape.num_pages = (100 + shape.page_size - 1) / shape.page_size + below(12);
    if (round >= 16) use_window(shape, 1 + below(20), below(20));
    TestLoop loop(hashed_logits, shape);
    const std::vector<int32_t> system(static_cast<size_t>(below(20)), 200);
    run_conversations(
        loop, std::vector<std::vector<int32_t>>(8, system), random,
        [](const std::vector<int32_t>& prompt, int64_t n) { return expected_greedy(prompt, n); },
        "round " + std::to_string(round));
    const EngineStats stats = loop.finish();
    num_cached += stats.cached_tokens_total;
    num_cached_with_window += round >= 16 ? stats.cached_tokens_total : 0;
    num_retracted += stats.num_retracted_reqs;
  }
  EXPECT_GT(num_cached, 1000);
  EXPECT_GT(num_cached_with_window, 500);
  EXPECT_GT(num_retracted, 0);
}

// 64 streams, cancelled at random times, with few window pages: neither group of pages leaks one.
TEST(StepLoopReuse, CancelledStreamsLeakNoPage) {
  std::mt19937 random(17);
  for (const bool samples : {false, true}) {
    LoopShape shape{
        .num_pages = 90,
        .page_size = 3,
        .scheduler = {.max_running_requests = 24, .chunked_prefill_size = 7, .max_prefill_tokens = 40},
        .context_length = 100,
        .num_groups = 2,
        .samples = samples};
    use_window(shape, 8, 30);
    TestLoop loop(hashed_logits, shape);
    run_cancelled_streams(loop, random, [](const std::vector<int32_t>& prompt, int64_t num_tokens) {
      return expected_greedy(prompt, num_tokens);
    });
    const EngineStats stats = loop.finish();
    EXPECT_GT(stats.num_aborted_requests_total, 10);
    EXPECT_GT(stats.cached_tokens_total, 100);
    EXPECT_EQ(stats.num_window_pages, 2 * shape.num_window_pages);
    EXPECT_TRUE(loop->flush_cache().ok());
    EXPECT_EQ(loop->stats().num_free_pages, stats.num_pages);
    EXPECT_EQ(loop->stats().num_free_window_pages, stats.num_window_pages);
  }
}

}  // namespace
}  // namespace fp4moe
