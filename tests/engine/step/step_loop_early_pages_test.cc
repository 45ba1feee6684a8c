// A decode engine gets the pages of a prompt while the prefill engine computes it: the prefill engine is held
// in one of its steps, so that nothing here depends on time.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/conversations.h"
#include "engine/fake_grammar.h"
#include "engine/test_nodes.h"

namespace fp4moe {
namespace {

using namespace std::chrono_literals;

// Steps of 16 tokens, pages of 4.
class EarlyPages : public SomeSample {
 protected:
  void start(int num_steps, LoopShape decode, LoopShape prefill = {},
             std::function<void(const Batch&)> before_decode = {}) {
    decode.samples = decode_shape().samples;
    prefill.samples = prefill_shape().samples;
    nodes_ = std::make_unique<Nodes>(decode, prefill, hashed_logits, gate_.hook(num_steps),
                                     std::move(before_decode));
  }
  void start(int num_steps) { start(num_steps, {}); }
  void TearDown() override { gate_.open(); }
  // Tokens in the pages that have left while the prefill engine is held in step n, counted from 0 on.
  int64_t tokens_in_step(int64_t n) const { return 16 * (prefill_shape().samples ? n - 1 : n); }
  int64_t token_bytes() { return nodes_->decode->executor().kv_token_bytes(); }
  EngineStats decode_stats() { return (*nodes_->decode)->stats(); }
  bool has_received(int64_t num_bytes) {
    return eventually([&] { return decode_stats().kv_transfer_bytes_total == num_bytes; });
  }
  // Asks for the text of a prompt, and waits until the decode engine has the pages that leave before the
  // prompt's last step.
  void receive_a_part(Collector& out) {
    start(3);
    ASSERT_TRUE(nodes_->submit(prompt_of(61), exactly(20), out).ok());
    gate_.wait_until_reached();
    ASSERT_TRUE(has_received(tokens_in_step(3) * token_bytes()));
  }
  bool are_empty() { return nodes_->decode_is_empty() && nodes_->prefill_is_empty(); }
  void end() {
    gate_.open();
    EXPECT_TRUE(are_empty());
  }

  Gate gate_;
  std::unique_ptr<Nodes> nodes_;
};
INSTANTIATE_TEST_SUITE_P(StepLoopNodes, EarlyPages, kSomeSample, SomeSample::name);

TEST_P(EarlyPages, ArriveBeforeThePromptIsComplete) {
  start(3);
  Collector out;
  const auto prompt = prompt_of(61);
  ASSERT_TRUE(nodes_->submit(prompt, exactly(20), out).ok());
  gate_.wait_until_reached();
  EXPECT_TRUE(has_received(tokens_in_step(3) * token_bytes()));
  EXPECT_EQ(out.num_deltas(), 0);
  EXPECT_EQ(decode_stats().num_awaited_reqs, 1);
  EXPECT_EQ(decode_stats().num_used_pages, 16);
  EXPECT_EQ((*nodes_->prefill)->stats().num_prompts_total, 0);
  gate_.open();
  EXPECT_EQ(out.wait().token_ids, expected_greedy(prompt, 20));
  EXPECT_TRUE(has_received(61 * token_bytes())) << "each page is sent once";
  end();
}

// With window layers, the full layers of all pages leave early, and the window layers of the last ones.
TEST_P(EarlyPages, OfWindowLayersToo) {
  LoopShape shape;
  shape.window = 30;
  shape.num_window_pages = 40;
  start(3, shape, shape);
  const int64_t window_bytes = nodes_->decode->executor().window_token_bytes();
  Collector out;
  const auto prompt = prompt_of(61);  // decode reads window pages from token 31 on, in page 7
  ASSERT_TRUE(nodes_->submit(prompt, exactly(20), out).ok());
  gate_.wait_until_reached();
  const int64_t num_tokens = tokens_in_step(3);
  EXPECT_TRUE(has_received(num_tokens * token_bytes() + (num_tokens - 28) * window_bytes));
  gate_.open();
  EXPECT_EQ(out.wait().token_ids, expected_greedy(prompt, 20));
  EXPECT_TRUE(has_received(61 * token_bytes() + (61 - 28) * window_bytes));
  end();
}

// A state is complete only at the end, and so is what a draft model adds to the pages.
TEST_P(EarlyPages, DoNotExistWithStates) {
  LoopShape shape;
  shape.num_slots = 8;
  start(3, shape, shape);
  Collector out;
  const auto prompt = prompt_of(61);
  ASSERT_TRUE(nodes_->submit(prompt, exactly(20), out).ok());
  gate_.wait_until_reached();
  EXPECT_TRUE(eventually([&] { return decode_stats().num_awaited_reqs == 1; }));
  EXPECT_EQ(decode_stats().num_used_pages, 0);
  gate_.open();
  EXPECT_EQ(out.wait().token_ids, expected_greedy(prompt, 20, hashed_logits_and_state));
  end();
}

// The decode engine's cached pages are not sent; if they hold the whole prompt, nothing is.
TEST_P(EarlyPages, BeginAfterCachedOnes) {
  start(5);
  const auto whole = prompt_of(32), prompt = prompt_of(61);
  EXPECT_EQ(nodes_->run(whole, exactly(4)).token_ids, expected_greedy(whole, 4));
  EXPECT_TRUE(nodes_->decode_is_empty());
  EXPECT_EQ(nodes_->run(whole, exactly(4)).token_ids, expected_greedy(whole, 4));
  EXPECT_TRUE(has_received(32 * token_bytes()));
  Collector out;
  ASSERT_TRUE(nodes_->submit(prompt, exactly(20), out).ok());
  gate_.open();
  EXPECT_EQ(out.wait().token_ids, expected_greedy(prompt, 20));
  EXPECT_TRUE(has_received(61 * token_bytes()));
  end();
}

// A client that leaves before anything was computed, or when some pages have arrived.
TEST_P(EarlyPages, OfACancelledRequestAreFree) {
  for (const int num_steps : {0, 3}) {
    Gate gate;
    Nodes nodes(decode_shape(), prefill_shape(), hashed_logits, gate.hook(num_steps));
    Collector out;
    const auto id = nodes.submit(prompt_of(61), exactly(60), out);
    ASSERT_TRUE(id.ok());
    gate.wait_until_reached();
    ASSERT_TRUE(eventually([&] { return (*nodes.decode)->stats().num_used_pages == 16; }));
    (*nodes.decode)->cancel(*id);
    EXPECT_EQ(out.wait().reason(), FinishReason::kAbort);
    EXPECT_TRUE(nodes.decode_is_empty()) << "while the prefill engine is held";
    EXPECT_EQ((*nodes.decode)->stats().num_cached_pages, 0);
    gate.open();
    EXPECT_TRUE(nodes.prefill_is_empty());
  }
}

TEST_P(EarlyPages, OfARequestThatIsCancelledLaterAreCached) {
  Gate decode_gate;
  start(0, {}, {}, decode_gate.hook());
  gate_.open();
  Collector out;
  const auto id = nodes_->submit(prompt_of(61), exactly(60), out);
  ASSERT_TRUE(id.ok());
  decode_gate.wait_until_reached();
  (*nodes_->decode)->cancel(*id);
  decode_gate.open();
  EXPECT_EQ(out.wait().reason(), FinishReason::kAbort);
  EXPECT_TRUE(eventually([&] { return decode_stats().num_cached_pages == 15; }));
  end();
}

// Without pages to spare, the request gets them when it has its first token.
TEST_P(EarlyPages, AreNotReservedInAFullPool) {
  LoopShape decode;
  decode.num_pages = 20;
  decode.context_length = 80;
  start(6, decode);
  Collector first, second;
  ASSERT_TRUE(nodes_->submit(prompt_of(33), exactly(3), first).ok());
  EXPECT_EQ(first.wait().token_ids, expected_greedy(prompt_of(33), 3));
  ASSERT_TRUE((*nodes_->decode)->flush_cache().ok());
  first = Collector();
  ASSERT_TRUE(nodes_->submit(prompt_of(61, 1), exactly(10), first).ok());  // steps 3 to 6
  gate_.wait_until_reached();
  ASSERT_TRUE(eventually([&] { return decode_stats().num_used_pages == 16; }));
  ASSERT_TRUE(nodes_->submit(prompt_of(33, 2), exactly(10), second).ok());
  ASSERT_TRUE(eventually([&] { return decode_stats().num_awaited_reqs == 2; }));
  EXPECT_EQ(decode_stats().num_used_pages, 16);
  gate_.open();
  EXPECT_EQ(first.wait().token_ids, expected_greedy(prompt_of(61, 1), 10));
  EXPECT_EQ(second.wait().token_ids, expected_greedy(prompt_of(33, 2), 10));
  end();
}

// A running request that grows gets the reserved pages. They are fetched again after the first token.
TEST_P(EarlyPages, AreGivenBackToARequestThatGrows) {
  LoopShape decode;
  decode.num_pages = 20;
  decode.context_length = 80;
  Gate decode_gate;
  start(4, decode, {}, decode_gate.hook(2));
  Collector grows, early;
  ASSERT_TRUE(nodes_->submit(prompt_of(5), exactly(70), grows).ok());  // a step of the prefill engine
  decode_gate.wait_until_reached();
  ASSERT_TRUE(nodes_->submit(prompt_of(57, 1), exactly(10), early).ok());
  decode_gate.open();
  gate_.wait_until_reached();
  EXPECT_EQ(grows.wait().token_ids, expected_greedy(prompt_of(5), 70));
  EXPECT_EQ(decode_stats().num_retracted_reqs, 0);
  EXPECT_TRUE(eventually([&] { return decode_stats().num_used_pages == 0; })) << "they were not given back";
  EXPECT_EQ(decode_stats().num_awaited_reqs, 1);
  EXPECT_EQ(early.num_deltas(), 0);
  gate_.open();
  EXPECT_EQ(early.wait().token_ids, expected_greedy(prompt_of(57, 1), 10));
  end();
}

// The pages can all have arrived while the request waits for its grammar. If others need them then, this
// engine computes the prompt, because the prefill engine has released it.
TEST_P(EarlyPages, CanAllArriveBeforeTheGrammarIsCompiled) {
  for (const bool are_needed : {false, true}) {
    const auto may_compile = std::make_shared<std::atomic<bool>>(false);
    const auto with_grammars = [](LoopShape shape, std::shared_ptr<std::atomic<bool>> is_open) {
      shape.grammars = [is_open] { return std::make_unique<OneTextCompiler>(is_open); };
      return shape;
    };
    LoopShape decode = with_grammars({}, may_compile);
    decode.num_pages = 20;
    decode.context_length = 80;
    start(0, decode, with_grammars({}, std::make_shared<std::atomic<bool>>(true)));
    gate_.open();
    SamplingParams sampling = greedy(20);
    sampling.grammar = {GrammarSpec::Kind::kRegex, "slow"};
    Collector out;
    ASSERT_TRUE(nodes_->submit(prompt_of(57, 1), sampling, out).ok());
    EXPECT_TRUE(has_received(57 * token_bytes()));
    EXPECT_TRUE(nodes_->prefill_is_empty());
    EXPECT_TRUE(eventually([&] { return decode_stats().num_awaited_reqs == 0; }));
    EXPECT_EQ(decode_stats().num_used_pages, 15);
    EXPECT_EQ(out.num_deltas(), 0);
    if (are_needed) {
      EXPECT_EQ(nodes_->run(prompt_of(5), exactly(70)).token_ids, expected_greedy(prompt_of(5), 70));
      EXPECT_TRUE(eventually([&] { return decode_stats().num_used_pages == 0; }));
    }
    may_compile->store(true);
    EXPECT_EQ(out.wait().text, "slow");
    EXPECT_TRUE(has_received((are_needed ? 62 : 57) * token_bytes()));
    EXPECT_TRUE(are_empty());
  }
}

// A prompt whose first mask turns out to be slow gives its pages to another one on the prefill engine, is
// computed again in other pages, and its transfer goes on: each page is sent once.
TEST_P(EarlyPages, OfAPreemptedPromptGoOn) {
  std::atomic<bool> is_slow = false, is_open = false;
  const auto with_grammars = [](LoopShape shape, const FakeCosts& costs) {
    shape.grammars = [costs] { return std::make_unique<CostlyCompiler>(costs); };
    return shape;
  };
  const FakeCosts cheap = [](auto&&...) { return FakeCost(); };
  const FakeCosts slow_at_first = [&](const std::string&, int64_t num_tokens, bool is_mask) {
    if (!is_mask || num_tokens > 0) return FakeCost();
    is_slow.wait(false);
    return FakeCost{.steps = 5'000'000, .until = &is_open};
  };
  LoopShape prefill = with_grammars({}, slow_at_first);
  prefill.num_pages = 16;
  prefill.context_length = 64;
  start(0, with_grammars({}, cheap), prefill);
  gate_.open();
  Request request{"", prompt_of(41), greedy(20)};
  request.sampling.grammar = {GrammarSpec::Kind::kRegex, "hashed"};
  TestLoop one(hashed_logits, with_grammars({}, cheap));
  const Answer want = one.run(request);
  request.prefill_node = nodes_->address();
  Collector out;
  EXPECT_TRUE((*nodes_->decode)->submit(request, out.callback()).ok());
  EXPECT_TRUE(eventually([&] {
    const EngineStats s = (*nodes_->prefill)->stats();
    return s.num_grammar_queue_reqs == 1 && s.num_used_pages == 11;
  }));
  is_slow = true;
  is_slow.notify_all();
  const auto other = prompt_of(40, 1);
  EXPECT_EQ(nodes_->run(other, exactly(5)).token_ids, expected_greedy(other, 5));
  EXPECT_GT((*nodes_->prefill)->stats().num_retracted_reqs, 0);
  EXPECT_EQ(out.num_deltas(), 0);
  is_open = true;
  EXPECT_EQ(out.wait().token_ids, want.token_ids);
  EXPECT_TRUE(has_received(81 * token_bytes()));
  end();
}

// Either engine dies when some pages have arrived.
TEST_P(EarlyPages, OfADeadPrefillEngineAreFree) {
  Collector out;
  ASSERT_NO_FATAL_FAILURE(receive_a_part(out));
  nodes_->node.reset();
  EXPECT_EQ(out.wait().last.error_code, StatusCode::kUnavailable);
  EXPECT_NE(out.wait().last.error.find("prefill node " + nodes_->address()), std::string::npos);
  EXPECT_TRUE(nodes_->decode_is_empty());
  gate_.open();
  EXPECT_TRUE(nodes_->prefill_is_empty());
}

TEST_P(EarlyPages, OfADeadDecodeEngineAreFree) {
  Collector out;
  ASSERT_NO_FATAL_FAILURE(receive_a_part(out));
  nodes_->decode.reset();
  EXPECT_EQ(out.wait().reason(), FinishReason::kAbort);
  gate_.open();
  EXPECT_TRUE(nodes_->prefill_is_empty());
}

// A step that fails on the decode engine ends its running requests; a reservation is not one.
TEST_P(EarlyPages, OfAPromptThatFailsAreFree) {
  Collector out;
  ASSERT_NO_FATAL_FAILURE(receive_a_part(out));
  nodes_->prefill->executor().page_failure = internal_error("no such page");
  gate_.open();
  EXPECT_EQ(out.wait().reason(), FinishReason::kError);
  EXPECT_NE(out.wait().last.error.find("no such page"), std::string::npos) << out.wait().last.error;
  end();
}

// Many requests at once, with pools so small that reservations are given back at any moment.
TEST_P(EarlyPages, ACrowdLosesNothing) {
  for (const auto& [num_pages, window, num_groups] : {std::tuple(14, 0, 1), {14, 6, 2}, {30, 6, 1}}) {
    LoopShape decode{.num_pages = num_pages, .samples = decode_shape().samples};
    LoopShape prefill{.num_pages = 64, .samples = prefill_shape().samples};
    decode.context_length = prefill.context_length = 56;
    decode.window = prefill.window = window;
    decode.num_window_pages = window == 0 ? 0 : 9;
    prefill.num_window_pages = window == 0 ? 0 : 12;
    decode.num_groups = num_groups;
    prefill.scheduler.chunked_prefill_size = 7;
    Nodes nodes(decode, prefill);
    std::vector<Collector> collectors(40);
    std::vector<std::vector<int32_t>> prompts;
    std::vector<std::string> ids;
    for (int i = 0; i < 40; ++i) {
      prompts.push_back(prompt_of(5 + i * 7 % 31, i % 9));
      const auto id = nodes.submit(prompts.back(), exactly(20), collectors[static_cast<size_t>(i)]);
      ASSERT_TRUE(id.ok());
      ids.push_back(*id);
      if (i % 5 == 4) std::this_thread::sleep_for(1ms);
      if (i % 8 == 7) (*nodes.decode)->cancel(ids[static_cast<size_t>(i - 3)]);
    }
    for (size_t i = 0; i < collectors.size(); ++i) {
      const Answer& answer = collectors[i].wait();
      if (answer.reason() == FinishReason::kAbort) continue;
      EXPECT_EQ(answer.token_ids, expected_greedy(prompts[i], 20)) << i << " " << answer.last.error;
    }
    EXPECT_TRUE(nodes.prefill_is_empty());
    EXPECT_TRUE(nodes.decode_is_empty());
  }
}

}  // namespace
}  // namespace fp4moe
