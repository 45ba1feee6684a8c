// A prefill engine and a decode engine on fake models over real connections: outputs equal those of a single
// engine, all pages are returned, and requests end correctly if one side cancels, is full or dies.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/conversations.h"
#include "engine/fake_grammar.h"
#include "engine/test_nodes.h"
#include "engine/test_peer.h"

namespace fp4moe {
namespace {

using namespace std::chrono_literals;

INSTANTIATE_TEST_SUITE_P(StepLoopNodes, SomeSample, kSomeSample, SomeSample::name);

TEST_P(SomeSample, AnswersAreThoseOfOneEngine) {
  Nodes nodes(decode_shape(), prefill_shape());
  TestLoop one;
  for (const int64_t num_tokens : {1, 3, 4, 5, 16, 37})
    for (const int64_t num_answer : {1, 2, 20}) {
      SamplingParams sampling{.temperature = 0.8f, .top_k = 20, .seed = 77, .max_new_tokens = num_answer};
      sampling.top_logprobs = 2;
      sampling.frequency_penalty = 0.5f;
      const auto prompt = prompt_of(num_tokens);
      const Answer want = one.run(prompt, sampling), got = nodes.run(prompt, sampling);
      EXPECT_EQ(got.token_ids, want.token_ids) << num_tokens << " " << num_answer;
      EXPECT_EQ(got.text, want.text);
      EXPECT_EQ(got.reason(), want.reason());
      EXPECT_EQ(got.last.prompt_tokens, num_tokens);
      ASSERT_EQ(got.logprobs.size(), want.logprobs.size());
      for (size_t i = 0; i < got.logprobs.size(); ++i) {
        EXPECT_EQ(got.logprobs[i].chosen.logprob, want.logprobs[i].chosen.logprob);
        EXPECT_EQ(got.logprobs[i].chosen.bytes, want.logprobs[i].chosen.bytes);
        EXPECT_EQ(got.logprobs[i].top.size(), 2u);
      }
      EXPECT_EQ(nodes.run(prompt, greedy(num_answer)).token_ids,
                one.run(prompt, greedy(num_answer)).token_ids);
    }
  EXPECT_EQ(nodes.run(prompt_of(5), greedy(0)).reason(), FinishReason::kLength);
  const EngineStats stats = (*nodes.decode)->stats();
  EXPECT_GT(stats.kv_transfer_bytes_total, 0);
  EXPECT_GT(stats.kv_transfer_copy_seconds_total, 0);
  EXPECT_GT(stats.kv_transfer_seconds_total, stats.kv_transfer_copy_seconds_total);
  EXPECT_GT(nodes.decode->executor().num_finishes, 5);  // before other threads fill pages
  EXPECT_TRUE(nodes.prefill_is_empty());
  EXPECT_TRUE(nodes.decode_is_empty());
}

// The prefill engine chooses the first token; the decode engine's matcher accepts it before its first mask.
TEST_P(SomeSample, GrammarsGoOnWhereTheFirstTokenWasChosen) {
  std::atomic<uint32_t> calls = 0;
  const auto with_grammars = [&](LoopShape shape, bool is_slow) {
    shape.grammars = [&calls, is_slow] {
      return std::make_unique<CostlyCompiler>([&calls, is_slow](const std::string&, int64_t, bool) {
        const uint32_t draw = calls++ * 2654435761u >> 16;
        return is_slow ? FakeCost{.steps = draw % 4 == 0 ? 5'000'000 : 1,
                                  .time = std::chrono::microseconds(draw % 700)}
                       : FakeCost();
      });
    };
    return shape;
  };
  Nodes nodes(with_grammars(decode_shape(), true), with_grammars(prefill_shape(), true));
  TestLoop one(hashed_logits, with_grammars({}, false));
  for (const std::string text : {"hashed", "some text", "x"})
    for (const int64_t num_answer : {1, 2, 20}) {
      SamplingParams sampling{.temperature = 0.8f, .seed = 5, .max_new_tokens = num_answer};
      sampling.grammar = {GrammarSpec::Kind::kRegex, text};
      const Answer want = one.run(prompt_of(9), sampling), got = nodes.run(prompt_of(9), sampling);
      EXPECT_EQ(got.token_ids, want.token_ids) << text << " " << num_answer;
      EXPECT_EQ(got.text, want.text);
      EXPECT_EQ(got.reason(), want.reason());
    }
  EXPECT_TRUE(nodes.prefill_is_empty());
  EXPECT_TRUE(nodes.decode_is_empty());
}

// The decode engine drafts after the first token, which the prefill engine chose.
TEST(StepLoopNodes, DraftsOfTheDecodeEngineChangeNothing) {
  const FakeLogits logits = [](std::span<const int32_t> history, std::span<float> out) {
    hashed_logits(history, out);
    for (float& x : out) x /= 4;
    out[static_cast<size_t>(history.back() % 3 + 1)] += 7;  // mostly a cycle
  };
  const auto with_grammars = [](LoopShape shape) {
    shape.grammars = [] { return std::make_unique<CostlyCompiler>([](auto&&...) { return FakeCost(); }); };
    return shape;
  };
  LoopShape shape = with_grammars({});
  shape.drafts = {.max_tokens = 3, .min_match = 1, .max_match = 4};
  Nodes nodes(shape, with_grammars({}), logits);
  TestLoop one(logits, with_grammars({}));
  // With a grammar, a draft is dropped if its mask is late, which depends on the machine's load.
  int64_t num_correct[2] = {};  // without and with a grammar
  for (const int64_t num_tokens : {1, 4, 5, 37})
    for (const int64_t num_answer : {1, 2, 40})
      for (const bool has_grammar : {false, true}) {
        Request request{
            "", prompt_of(num_tokens), {.temperature = 0.8f, .seed = 77, .max_new_tokens = num_answer}};
        if (has_grammar) request.sampling.grammar = {GrammarSpec::Kind::kRegex, "hashed"};
        request.routed_experts_from = 0;
        const Answer want = one.run(request);
        request.prefill_node = nodes.address();
        Collector got;
        ASSERT_TRUE((*nodes.decode)->submit(request, got.callback()).ok());
        EXPECT_EQ(got.wait().token_ids, want.token_ids) << num_tokens << " " << num_answer;
        ASSERT_NE(got.wait().last.routed_experts, nullptr);
        EXPECT_EQ(*got.wait().last.routed_experts, *want.last.routed_experts);
        num_correct[has_grammar] += got.wait().last.spec_num_correct_drafts;
      }
  EXPECT_GT(num_correct[0], 80);
  EXPECT_GT(num_correct[1], 0);
  EXPECT_TRUE(nodes.prefill_is_empty());
  EXPECT_TRUE(nodes.decode_is_empty());
}

void expect_same_ids(const PositionLogprobs& a, const PositionLogprobs& b) {
  ASSERT_EQ(a.ids.size(), 2u);
  ASSERT_EQ(b.ids.size(), 2u);
  for (size_t k = 0; k < 2; ++k) {
    EXPECT_EQ(a.ids[k].token_id, b.ids[k].token_id);
    EXPECT_EQ(a.ids[k].logprob, b.ids[k].logprob);
    EXPECT_EQ(a.ids[k].bytes, b.ids[k].bytes);
  }
}

// The prompt's log-probabilities and experts arrive with the first token, even if no output is requested.
TEST_P(SomeSample, PromptsAreScored) {
  Nodes nodes(decode_shape(), prefill_shape());
  TestLoop one;
  for (const int64_t num_answer : {0, 5}) {
    Request request{"", prompt_of(21), greedy(num_answer)};
    request.sampling.top_logprobs = 1;
    request.sampling.token_ids_logprob = {7, 3};
    request.prompt_logprobs_from = 2;
    request.routed_experts_from = 4;
    Collector want, got;
    ASSERT_TRUE(one->submit(request, want.callback()).ok());
    request.prefill_node = nodes.address();
    ASSERT_TRUE((*nodes.decode)->submit(request, got.callback()).ok());
    EXPECT_EQ(got.wait().token_ids, want.wait().token_ids);
    const auto &a = got.wait().prompt_logprobs, &b = want.wait().prompt_logprobs;
    ASSERT_EQ(a.size(), b.size());
    EXPECT_EQ(a.size(), 18u);
    ASSERT_NE(want.wait().last.routed_experts, nullptr);
    ASSERT_NE(got.wait().last.routed_experts, nullptr);
    EXPECT_EQ(*got.wait().last.routed_experts, *want.wait().last.routed_experts);
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(a[i].chosen.token_id, b[i].chosen.token_id);
      EXPECT_EQ(a[i].chosen.logprob, b[i].chosen.logprob);
      EXPECT_EQ(a[i].chosen.bytes, b[i].chosen.bytes);
      expect_same_ids(a[i], b[i]);
    }
    const auto &output = got.wait().logprobs, &wanted = want.wait().logprobs;
    ASSERT_EQ(output.size(), std::max<size_t>(1, static_cast<size_t>(num_answer)));
    ASSERT_EQ(output.size(), wanted.size());
    for (size_t i = 0; i < output.size(); ++i) expect_same_ids(output[i], wanted[i]);
    EXPECT_EQ(output[0].chosen.token_id, num_answer == 0 ? -1 : got.wait().token_ids[0]);
  }
  EXPECT_TRUE(nodes.prefill_is_empty());
  EXPECT_TRUE(nodes.decode_is_empty());
}

// Pages that the decode engine already has are not requested: only the bytes of the last, partial page are
// sent.
TEST(StepLoopNodes, PagesThatAreKnownDoNotTravel) {
  Nodes nodes;
  const auto prompt = prompt_of(18);
  const int64_t token_bytes = nodes.decode->executor().kv_token_bytes();
  nodes.run(prompt, greedy(4));
  const int64_t bytes = (*nodes.decode)->stats().kv_transfer_bytes_total;
  EXPECT_EQ(bytes, 18 * token_bytes);
  EXPECT_EQ(nodes.run(prompt, greedy(4)).token_ids, expected_greedy(prompt, 4));
  EXPECT_TRUE(eventually(
      [&] { return (*nodes.decode)->stats().kv_transfer_bytes_total == bytes + 2 * token_bytes; }));
  const auto whole = prompt_of(16);
  nodes.run(whole, greedy(2));
  EXPECT_EQ(nodes.run(whole, greedy(4)).token_ids, expected_greedy(whole, 4));
  EXPECT_TRUE(nodes.prefill_is_empty());
}

// Window layers: only the pages that decode reads are sent, and only if the decode engine does not have them.
TEST_P(SomeSample, OnlyTheLastWindowPagesTravel) {
  LoopShape decode = decode_shape(), prefill = prefill_shape();
  for (LoopShape* shape : {&decode, &prefill}) {
    shape->window = 6;
    shape->num_window_pages = 40;
  }
  Nodes nodes(decode, prefill);
  const int64_t full_bytes = nodes.decode->executor().kv_token_bytes();
  const int64_t window_bytes = nodes.decode->executor().window_token_bytes();
  ASSERT_GT(window_bytes, 0);
  int64_t bytes = 0;
  for (const int64_t num_tokens : {1, 3, 4, 9, 18, 37}) {
    const auto prompt = prompt_of(num_tokens, static_cast<int32_t>(num_tokens));
    const auto expect_sent = [&](int64_t full, int64_t window) {
      bytes += full * full_bytes + window * window_bytes;
      EXPECT_TRUE(eventually([&] { return (*nodes.decode)->stats().kv_transfer_bytes_total == bytes; }))
          << num_tokens << ": " << (*nodes.decode)->stats().kv_transfer_bytes_total << " not " << bytes;
    };
    EXPECT_EQ(nodes.run(prompt, greedy(20)).token_ids, expected_greedy(prompt, 20));
    // Decode continues from the last page boundary and reads 5 tokens before it, in pages of 4.
    const int64_t first = std::max<int64_t>(0, num_tokens / 4 * 4 - 5) / 4 * 4;
    expect_sent(num_tokens, num_tokens - first);
    EXPECT_EQ(nodes.run(prompt, greedy(20)).token_ids, expected_greedy(prompt, 20));
    const int64_t last = num_tokens % 4;  // the whole pages are known
    expect_sent(last, last);
  }
  EXPECT_TRUE(nodes.prefill_is_empty());
  EXPECT_TRUE(nodes.decode_is_empty());
}

// Many requests run at once, with data-parallel groups on either side and a decode pool so small that some
// requests queue and are retracted while others continue.
TEST_P(SomeSample, AFullPoolQueuesAndRetractsWithoutLoss) {
  for (const auto& [reuses, window, prefill_groups, decode_groups] :
       {std::tuple(false, 0, 2, 1), {true, 0, 1, 2}, {false, 6, 1, 2}, {true, 6, 2, 1}, {true, 6, 2, 3}}) {
    LoopShape decode = decode_shape(), prefill = prefill_shape();
    decode.num_pages = 12;
    decode.context_length = 40;
    decode.window = prefill.window = window;
    decode.num_window_pages = window == 0 ? 0 : 7;
    prefill.num_window_pages = window == 0 ? 0 : 9;
    decode.reuses_prefixes = prefill.reuses_prefixes = reuses;
    prefill.num_groups = prefill_groups;
    decode.num_groups = decode_groups;
    prefill.num_pages = 32;
    Nodes nodes(decode, prefill);
    std::vector<Collector> collectors(24);
    std::vector<std::vector<int32_t>> prompts;
    for (int i = 0; i < 24; ++i) {
      prompts.push_back(prompt_of(5 + i % 13, i));
      ASSERT_TRUE(nodes.submit(prompts.back(), greedy(20), collectors[static_cast<size_t>(i)]).ok());
    }
    for (size_t i = 0; i < collectors.size(); ++i)
      EXPECT_EQ(collectors[i].wait().token_ids, expected_greedy(prompts[i], 20)) << i;
    EXPECT_TRUE(nodes.prefill_is_empty());
    EXPECT_TRUE(nodes.decode_is_empty());
  }
}

// The prefill engine releases held pages after a timeout; the request that waits for them fails with that
// reason.
TEST(StepLoopNodes, PagesThatNobodyTakesAreGivenBack) {
  LoopShape decode, prefill;
  decode.num_pages = 8;
  decode.context_length = 32;
  prefill.time_limits.held = 0.2;
  std::atomic<bool> slow = false;
  decode.scheduler.max_running_requests = 1;
  FakeLogits logits = [&slow](std::span<const int32_t> history, std::span<float> out) {
    if (slow.load() && history.size() > 8) std::this_thread::sleep_for(30ms);
    hashed_logits(history, out);
  };
  Nodes nodes(decode, prefill, logits);
  slow = true;
  Collector first, second;
  ASSERT_TRUE(nodes.submit(prompt_of(8), greedy(24), first).ok());
  ASSERT_TRUE(eventually([&] { return first.num_deltas() > 2; }));
  ASSERT_TRUE(nodes.submit(prompt_of(8, 1), greedy(24), second).ok());
  const Answer& late = second.wait();
  EXPECT_EQ(late.reason(), FinishReason::kError);
  EXPECT_EQ(late.last.error_code, StatusCode::kUnavailable);
  EXPECT_NE(late.last.error.find("prefill node " + nodes.address()), std::string::npos) << late.last.error;
  EXPECT_NE(late.last.error.find("--disaggregation-timeout 0.2 s"), std::string::npos) << late.last.error;
  EXPECT_EQ(first.wait().token_ids, expected_greedy(prompt_of(8), 24));
  EXPECT_TRUE(nodes.prefill_is_empty());
}

// A page that an executor cannot read or write fails its request.
TEST(StepLoopNodes, PagesThatCannotBeReadOrWrittenFailTheirRequest) {
  for (const bool on_prefill : {true, false}) {
    Nodes nodes;
    (on_prefill ? nodes.prefill : nodes.decode)->executor().page_failure = internal_error("no such page");
    const Answer answer = nodes.run(prompt_of(9), greedy(4));
    EXPECT_EQ(answer.reason(), FinishReason::kError);
    EXPECT_EQ(answer.last.error_code, StatusCode::kInternal);
    EXPECT_NE(answer.last.error.find("no such page"), std::string::npos) << answer.last.error;
    EXPECT_EQ(answer.last.error.find(nodes.address()) != std::string::npos, on_prefill) << answer.last.error;
    EXPECT_TRUE(nodes.prefill_is_empty());
    EXPECT_TRUE(nodes.decode_is_empty());
  }
}

TEST(StepLoopNodes, AnAbortReachesThePrefillEngine) {
  Gate gate;
  Nodes nodes({}, {}, hashed_logits, gate.hook());
  Collector collector;
  const auto id = nodes.submit(prompt_of(30), greedy(20), collector);
  gate.wait_until_reached();
  (*nodes.decode)->cancel(*id);
  EXPECT_EQ(collector.wait().reason(), FinishReason::kAbort);
  gate.open();
  EXPECT_TRUE(eventually([&] { return (*nodes.prefill)->stats().num_requests_total == 1; }));
  EXPECT_TRUE(nodes.prefill_is_empty());
  EXPECT_TRUE(nodes.decode_is_empty());
}

TEST(StepLoopNodes, ADeadPrefillEngineFailsItsRequestsAndIsTakenAgain) {
  Gate gate;
  Nodes nodes({}, {}, hashed_logits, gate.hook());
  Collector collector;
  ASSERT_TRUE(nodes.submit(prompt_of(9), greedy(20), collector).ok());
  gate.wait_until_reached();
  std::thread opener([&] {
    std::this_thread::sleep_for(50ms);
    gate.open();
  });
  nodes.kill_prefill();
  opener.join();
  const Answer& lost = collector.wait();
  EXPECT_EQ(lost.last.error_code, StatusCode::kUnavailable);
  EXPECT_NE(lost.last.error.find("prefill node " + nodes.address()), std::string::npos) << lost.last.error;

  const Answer refused = nodes.run(prompt_of(9), greedy(20));
  EXPECT_NE(refused.last.error.find("cannot connect"), std::string::npos) << refused.last.error;
  nodes.start_prefill(kHello);
  EXPECT_EQ(nodes.run(prompt_of(9), greedy(20)).token_ids, expected_greedy(prompt_of(9), 20));
  EXPECT_TRUE(nodes.decode_is_empty());
}

TEST(StepLoopNodes, ADeadDecodeEngineLeavesNothingHeld) {
  LoopShape small;
  small.scheduler.max_running_requests = 1;
  Nodes nodes(small);
  std::vector<Collector> collectors(6);
  for (size_t i = 0; i < collectors.size(); ++i)
    ASSERT_TRUE(nodes.submit(prompt_of(9, static_cast<int32_t>(i)), greedy(100), collectors[i]).ok());
  nodes.decode.reset();
  EXPECT_TRUE(nodes.prefill_is_empty());
  LoopShape again;
  again.hello = kHello;
  nodes.decode.emplace(hashed_logits, again);
  EXPECT_EQ(nodes.run(prompt_of(9), greedy(20)).token_ids, expected_greedy(prompt_of(9), 20));
}

TEST(StepLoopNodes, NodesThatDoNotFitRefuseEachOther) {
  Nodes nodes;
  nodes.kill_prefill();
  nodes.start_prefill({0, {{"protocol", "1"}, {"--page-size", "8"}}});
  const Answer answer = nodes.run(prompt_of(9), greedy(20));
  EXPECT_EQ(answer.reason(), FinishReason::kError);
  EXPECT_NE(answer.last.error.find("--page-size is 8 on the prefill node and 4 on the decode node"),
            std::string::npos)
      << answer.last.error;

  TestLoop one;
  Request request{"", prompt_of(3), greedy(2)};
  request.prefill_node = nodes.address();
  EXPECT_EQ(one->submit(request, {}).status().code(), StatusCode::kUnsupported);
  for (const std::string place : {"nowhere", "10.0.0.1:8998"}) {
    request.prefill_node = place;
    EXPECT_EQ((*nodes.decode)->submit(request, {}).status().code(), StatusCode::kInvalidArgument) << place;
  }
}

KvHello hello_with_version(const std::string& version) {
  KvHello hello = kHello;
  hello.facts.emplace_back("weight version", version);
  return hello;
}

// A prompt that arrives while a decode engine waits to update its weights is sent after the update.
TEST(StepLoopNodes, NodesWithOtherWeightsRefuseEachOther) {
  Nodes nodes({}, {}, hashed_logits, {}, [](const Batch&) { std::this_thread::sleep_for(10ms); });
  Collector running, waiting;
  ASSERT_TRUE(nodes.submit(prompt_of(9), exactly(100), running).ok());
  ASSERT_TRUE(eventually([&] { return (*nodes.decode)->stats().generation_tokens_total > 0; }));
  const auto update_decode = [&]() -> Status {
    (*nodes.decode)->set_hello(hello_with_version("2"));
    return {};
  };
  auto updated =
      std::async(std::launch::async, [&] { return (*nodes.decode)->update_weights(update_decode, false); });
  std::this_thread::sleep_for(100ms);
  ASSERT_TRUE(nodes.submit(prompt_of(5), greedy(4), waiting).ok());
  std::this_thread::sleep_for(100ms);
  EXPECT_EQ((*nodes.prefill)->stats().num_prompts_total, 1);
  EXPECT_EQ(running.wait().token_ids, expected_greedy(prompt_of(9), 100));
  EXPECT_TRUE(updated.get().ok());
  const std::string refusal = " on the prefill node and 2 on the decode node";
  EXPECT_NE(waiting.wait().last.error.find(refusal), std::string::npos) << waiting.wait().last.error;
  EXPECT_EQ(waiting.wait().last.error_code, StatusCode::kUnavailable);
  EXPECT_EQ((*nodes.prefill)->stats().num_prompts_total, 1);

  const auto update_prefill = [&]() -> Status {
    nodes.node->set_hello(hello_with_version("2"), unavailable("updated"));
    return {};
  };
  EXPECT_TRUE((*nodes.prefill)->update_weights(update_prefill, false).ok());
  EXPECT_EQ(nodes.run(prompt_of(9), greedy(20)).token_ids, expected_greedy(prompt_of(9), 20));
  EXPECT_TRUE(nodes.decode_is_empty());
  EXPECT_TRUE(nodes.prefill_is_empty());
}

TEST(StepLoopNodes, APromptThatWaitsForNewWeightsFailsByName) {
  Nodes nodes;
  EXPECT_EQ(nodes.run(prompt_of(9), greedy(20)).token_ids, expected_greedy(prompt_of(9), 20));
  std::promise<void> may_update;
  std::atomic<bool> is_updating{false};
  const auto update = [&]() -> Status {
    is_updating = true;
    may_update.get_future().wait();
    nodes.node->set_hello(hello_with_version("2"), unavailable("new weights"));
    return {};
  };
  auto updated =
      std::async(std::launch::async, [&] { return (*nodes.prefill)->update_weights(update, false); });
  ASSERT_TRUE(eventually([&] { return is_updating.load(); }));
  Collector waiting;
  ASSERT_TRUE(nodes.submit(prompt_of(5), greedy(4), waiting).ok());
  ASSERT_TRUE(eventually([&] { return (*nodes.prefill)->stats().num_queue_reqs == 1; }));
  may_update.set_value();
  EXPECT_TRUE(updated.get().ok());
  EXPECT_EQ(waiting.wait().last.error, "prefill node " + nodes.address() + ": new weights");
  EXPECT_TRUE(waiting.wait().token_ids.empty());
  const Answer refused = nodes.run(prompt_of(9), greedy(20));
  EXPECT_NE(refused.last.error.find("weight version is 2 on the prefill node and "), std::string::npos)
      << refused.last.error;
  EXPECT_TRUE(nodes.prefill_is_empty());
  EXPECT_TRUE(nodes.decode_is_empty());
}

// Errors from the prefill engine reach the client with the node's name.
TEST(StepLoopNodes, RefusalsOfThePrefillEngineArePassedOn) {
  LoopShape prefill;
  prefill.context_length = 16;
  Nodes nodes({}, prefill);
  const Answer answer = nodes.run(prompt_of(30), greedy(4));
  EXPECT_EQ(answer.last.error_code, StatusCode::kDoesNotFit);
  EXPECT_NE(answer.last.error.find(
                "maximum context length is 16 tokens (prompt and output together), but the prompt has 30"),
            std::string::npos);
  EXPECT_NE(answer.last.error.find(nodes.address()), std::string::npos);
}

// If a peer speaks another protocol, its connection ends and other connections continue.
TEST(StepLoopNodes, GarbageOnThePortHurtsNobody) {
  Nodes nodes;
  const int port = nodes.node->port();
  for (const std::string& bytes : {std::string("GET / HTTP/1.1\r\nHost: x\r\n\r\n                         "),
                                   std::string(200, '\0'), std::string("F4PD")}) {
    auto socket = connect_to(port);
    ASSERT_TRUE(socket.ok());
    ASSERT_TRUE((*socket)->send({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}).ok());
    if (bytes.size() > 40) {
      const auto refusal = (*socket)->receive({.stage = KvStage::kChallenge});
      ASSERT_TRUE(refusal.ok()) << refusal.status().to_string();
      EXPECT_EQ(decode_failure(refusal->payload).code(), StatusCode::kDataLoss);
      EXPECT_FALSE((*socket)->receive({.stage = KvStage::kChallenge}).ok());
    }
  }
  // A node that sends a valid hello and then requests under another epoch, or takes pages of an unknown room.
  for (const bool wrong_epoch : {true, false}) {
    auto socket = connect_to(port);
    ASSERT_TRUE(socket.ok());
    const auto reply = greet_prefill_node(**socket, kHello, NodeSecret(), in_seconds(20));
    ASSERT_TRUE(reply.ok());
    const uint64_t epoch = reply->epoch;
    const KvLegal legal{.stage = KvStage::kToDecode, .epoch = epoch};
    SamplingParams sampling = greedy(4);
    sampling.seed = 1;
    const std::string ask = encode_prefill({.input_ids = prompt_of(9), .sampling = sampling});
    ASSERT_TRUE(
        (*socket)
            ->send(kv_frame(KvFrameType::kPrefill, wrong_epoch ? epoch + 1 : epoch, 5, std::string_view(ask)))
            .ok());
    if (!wrong_epoch) {
      const auto first = (*socket)->receive(legal);
      ASSERT_TRUE(first.ok());
      EXPECT_EQ(first->header.type, KvFrameType::kFirstToken);
      const int64_t page = 99;
      ASSERT_TRUE((*socket)
                      ->send(kv_frame(KvFrameType::kTake, epoch, 5,
                                      {reinterpret_cast<const uint8_t*>(&page), sizeof page}))
                      .ok());
    }
    EXPECT_FALSE((*socket)->receive(legal).ok());
  }
  EXPECT_EQ(nodes.run(prompt_of(9), greedy(20)).token_ids, expected_greedy(prompt_of(9), 20));
  EXPECT_TRUE(nodes.prefill_is_empty());
}

}  // namespace
}  // namespace fp4moe
