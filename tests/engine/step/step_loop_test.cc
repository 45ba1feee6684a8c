#include "engine/step/step_loop.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <new>
#include <random>

#include "engine/test_loop.h"

namespace fp4moe {
namespace {

TEST(StepLoop, AnswersUntilTheModelEnds) {
  TestLoop loop(says("hello"));
  const Answer answer = loop.run({'x'}, greedy(100));
  EXPECT_EQ(answer.text, "hello");
  EXPECT_EQ(answer.reason(), FinishReason::kStop);
  EXPECT_EQ(answer.last.matched_stop_token, kEosId);
  EXPECT_EQ(answer.token_ids.size(), 6u);
  EXPECT_EQ(answer.last.prompt_tokens, 1);
  const EngineStats stats = loop.finish();
  EXPECT_EQ(stats.num_requests_total, 1);
  EXPECT_EQ(stats.prompt_tokens_total, 1);
  EXPECT_EQ(stats.generation_tokens_total, 6);
}

TEST(StepLoop, RefusesWhatIsIllegal) {
  TestLoop loop;
  const auto code_of = [&](std::vector<int32_t> ids, const SamplingParams& sampling) {
    return loop->submit({"", std::move(ids), sampling}, [](const Delta&) { ADD_FAILURE(); }).status();
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<SamplingParams> bad = {{.temperature = -1},
                                           {.temperature = nan},
                                           {.temperature = 101},
                                           {.top_p = 0},
                                           {.top_p = nan},
                                           {.top_p = 1.5f},
                                           {.top_k = 0},
                                           {.top_k = -2},
                                           {.max_new_tokens = -1},
                                           {.stop = {""}},
                                           {.stop = {"a", "\xc3"}},
                                           {.stop = {"\xa9"}},
                                           {.stop_token_ids = {-1}},
                                           {.stop_token_ids = {300}},
                                           {.top_logprobs = 21},
                                           {.top_logprobs = -2},
                                           {.stop = std::vector<std::string>(65, "a")},
                                           {.stop = {std::string(1025, 'a')}}};
  for (size_t i = 0; i < bad.size(); ++i)
    EXPECT_EQ(code_of({1}, bad[i]).code(), StatusCode::kInvalidArgument) << "case " << i;
  EXPECT_EQ(code_of({}, greedy(1)).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of({1, -1}, greedy(1)).message(), "input_ids[1]=-1; must be between 0 and 299");
  EXPECT_EQ(code_of({300}, greedy(1)).message(), "input_ids[0]=300; must be between 0 and 299");
  const Status too_long = code_of(std::vector<int32_t>(128, 1), greedy(1));
  EXPECT_EQ(too_long.code(), StatusCode::kDoesNotFit);
  EXPECT_EQ(
      too_long.message(),
      "This model's maximum context length is 128 tokens (prompt and output together), but the prompt has "
      "128 tokens");
}

TEST(StepLoop, MaxNewTokens) {
  TestLoop loop(says("abcdefgh"));
  EXPECT_EQ(loop.run({'x'}, greedy(0)).reason(), FinishReason::kLength);
  EXPECT_EQ(loop.run({'x'}, greedy(0)).text, "");
  const Answer three = loop.run({'x'}, greedy(3));
  EXPECT_EQ(three.text, "abc");
  EXPECT_EQ(three.reason(), FinishReason::kLength);
  // A prompt that fills the context is valid if no output is requested; a huge limit is reduced to the rest
  // of the context.
  EXPECT_EQ(loop.run(std::vector<int32_t>(128, 1), greedy(0)).reason(), FinishReason::kLength);
  const Answer cut = loop.run(std::vector<int32_t>(120, 1),
                              {.temperature = 0, .max_new_tokens = INT64_MAX, .ignore_eos = true});
  EXPECT_EQ(cut.token_ids.size(), 8u);
  EXPECT_EQ(cut.reason(), FinishReason::kLength);
  loop.finish();
}

TEST(StepLoop, StopStrings) {
  TestLoop loop(says("one STOP two"));
  SamplingParams sampling = greedy(50);
  sampling.stop = {"STOP"};  // spans four tokens
  Answer answer = loop.run({'x'}, sampling);
  EXPECT_EQ(answer.text, "one ");
  EXPECT_EQ(answer.reason(), FinishReason::kStop);
  EXPECT_EQ(answer.last.matched_stop, "STOP");
  EXPECT_EQ(answer.last.matched_stop_token, -1);
  EXPECT_EQ(answer.token_ids.size(), 8u);

  sampling.no_stop_trim = true;
  EXPECT_EQ(loop.run({'x'}, sampling).text, "one STOP");

  sampling = greedy(6);
  sampling.stop = {"STOP"};  // the limit falls inside the stop string, so the held text is output
  answer = loop.run({'x'}, sampling);
  EXPECT_EQ(answer.text, "one ST");
  EXPECT_EQ(answer.reason(), FinishReason::kLength);

  sampling = greedy(8);
  sampling.stop = {"TO", "STOP", "OP"};
  EXPECT_EQ(loop.run({'x'}, sampling).text, "one S");
  sampling.stop = {"o"};  // at the first token
  answer = loop.run({'x'}, sampling);
  EXPECT_EQ(answer.text, "");
  EXPECT_EQ(answer.token_ids.size(), 1u);
  EXPECT_EQ(answer.last.matched_stop, "o");
  loop.finish();
}

TEST(StepLoop, StopTokensAndIgnoreEos) {
  TestLoop loop(says({'a', kFirstWordId, 'b', kEosId, 'c'}));
  SamplingParams sampling = greedy(5);
  sampling.stop_token_ids = {kFirstWordId};
  Answer answer = loop.run({'x'}, sampling);
  EXPECT_EQ(answer.text, "a");
  EXPECT_EQ(answer.last.matched_stop_token, kFirstWordId);
  EXPECT_EQ(answer.token_ids, (std::vector<int32_t>{'a', kFirstWordId}));
  sampling.no_stop_trim = true;
  EXPECT_EQ(loop.run({'x'}, sampling).text, "a<a>");
  EXPECT_EQ(loop.run({'x'}, greedy(5)).text, "a<a>b");

  sampling = greedy(5);
  sampling.ignore_eos = true;
  answer = loop.run({'x'}, sampling);
  EXPECT_EQ(answer.text, "a<a>bc");
  EXPECT_EQ(answer.reason(), FinishReason::kLength);
  sampling.skip_special_tokens = false;
  EXPECT_EQ(loop.run({'x'}, sampling).text, "a<a>b<eos>c");
}

TEST(StepLoop, LogprobsOfEveryToken) {
  TestLoop loop;
  SamplingParams sampling{
      .temperature = 1, .seed = 3, .max_new_tokens = 10, .ignore_eos = true, .top_logprobs = 5};
  const Answer answer = loop.run({1, 2, 3}, sampling);
  ASSERT_EQ(answer.logprobs.size(), 10u);
  for (size_t i = 0; i < 10; ++i) {
    EXPECT_EQ(answer.logprobs[i].chosen.token_id, answer.token_ids[i]);
    EXPECT_LT(answer.token_ids[i], kFirstWordId + 2) << "an id without a token";
    ASSERT_EQ(answer.logprobs[i].top.size(), 5u);
    EXPECT_GE(answer.logprobs[i].top[0].logprob, answer.logprobs[i].chosen.logprob);
    EXPECT_FALSE(answer.logprobs[i].chosen.bytes.empty());
  }
  sampling.top_logprobs = 0;
  EXPECT_TRUE(loop.run({1, 2, 3}, sampling).logprobs[0].top.empty());
  sampling.top_logprobs = -1;
  EXPECT_TRUE(loop.run({1, 2, 3}, sampling).logprobs.empty());
}

TEST(StepLoop, SeedsMakeTextReproducibleWhateverElseRuns) {
  TestLoop loop;
  const SamplingParams seeded{.seed = 17, .max_new_tokens = 20, .ignore_eos = true};
  const Answer alone = loop.run({5, 6}, seeded);
  std::vector<Collector> crowd(12);
  for (size_t i = 0; i < crowd.size(); ++i) {
    const SamplingParams unseeded{.max_new_tokens = 20, .ignore_eos = true};
    ASSERT_TRUE(loop->submit({"", {5, 6}, i == 7 ? seeded : unseeded}, crowd[i].callback()).ok());
  }
  EXPECT_EQ(crowd[7].wait().token_ids, alone.token_ids);
  EXPECT_NE(crowd[0].wait().token_ids, crowd[1].wait().token_ids);
  SamplingParams other = seeded;
  other.seed = 18;
  EXPECT_NE(loop.run({5, 6}, other).token_ids, alone.token_ids);
  TestLoop again;  // requests without a seed derive it from the engine's random_seed
  EXPECT_EQ(again.run({9}, {.max_new_tokens = 20, .ignore_eos = true}).token_ids,
            TestLoop().run({9}, {.max_new_tokens = 20, .ignore_eos = true}).token_ids);
}

// With few pages, many requests, random arrival and all chunk and page sizes, each output equals that of its
// prompt alone, and all pages are returned.
TEST(StepLoop, GreedyTextIsIndependentOfTheCrowd) {
  std::mt19937 generator(5);
  const auto uniform = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(generator);
  };
  int64_t num_retracted = 0;
  for (int round = 0; round < 24; ++round) {
    LoopShape shape{.page_size = 1 + round % 6,
                    .scheduler = {.max_running_requests = uniform(1, 8),
                                  .chunked_prefill_size = 1 + round % 9,
                                  .max_prefill_tokens = uniform(1, 20)},
                    .context_length = 60};
    shape.num_pages = (60 + shape.page_size - 1) / shape.page_size + uniform(0, 10);
    TestLoop loop(hashed_logits, shape);
    constexpr size_t kRequests = 20;
    std::vector<Collector> collectors(kRequests);
    std::vector<std::vector<int32_t>> prompts(kRequests);
    std::vector<int> num_output_tokens(kRequests);
    for (size_t i = 0; i < kRequests; ++i) {
      for (int n = uniform(1, 30); n > 0; --n) prompts[i].push_back(uniform(0, kVocab - 1));
      num_output_tokens[i] = uniform(1, 30);
      SamplingParams sampling = greedy(num_output_tokens[i]);
      sampling.ignore_eos = true;
      ASSERT_TRUE(loop->submit({"", prompts[i], sampling}, collectors[i].callback()).ok());
      if (uniform(0, 3) == 0) collectors[static_cast<size_t>(uniform(0, static_cast<int>(i)))].wait();
    }
    for (size_t i = 0; i < kRequests; ++i)
      EXPECT_EQ(collectors[i].wait().token_ids, expected_greedy(prompts[i], num_output_tokens[i]))
          << "round " << round << " request " << i;
    num_retracted += loop.finish().num_retracted_reqs;
  }
  EXPECT_GT(num_retracted, 0) << "no pool was small enough to test retraction";
}

TEST(StepLoop, CancelWhileQueuedPrefillingAndDecoding) {
  Gate gate;
  TestLoop loop(
      hashed_logits,
      {.scheduler = {.max_running_requests = 2, .chunked_prefill_size = 4, .max_prefill_tokens = 8}},
      gate.hook());
  SamplingParams sampling = greedy(100);
  sampling.ignore_eos = true;
  Collector decoding, prefilling, queued;
  ASSERT_TRUE(loop->submit({"decoding", {1}, sampling}, decoding.callback()).ok());
  gate.wait_until_reached();
  ASSERT_TRUE(
      loop->submit({"prefilling", std::vector<int32_t>(20, 1), sampling}, prefilling.callback()).ok());
  ASSERT_TRUE(loop->submit({"queued", {1}, sampling}, queued.callback()).ok());
  for (const char* id : {"queued", "prefilling", "decoding", "unknown", "decoding"}) loop->cancel(id);
  gate.open();
  for (Collector* collector : {&decoding, &prefilling, &queued})
    EXPECT_EQ(collector->wait().reason(), FinishReason::kAbort);
  EXPECT_EQ(decoding.wait().last.completion_tokens, 1);
  EXPECT_EQ(loop.finish().num_aborted_requests_total, 3);
}

TEST(StepLoop, CancelAtAnyMoment) {
  TestLoop loop(hashed_logits, {.num_pages = 40, .page_size = 4});
  std::mt19937 generator(6);
  std::vector<Collector> collectors(200);
  for (size_t i = 0; i < collectors.size(); ++i) {
    SamplingParams sampling = greedy(40);
    sampling.ignore_eos = true;
    const std::vector<int32_t> prompt(1 + generator() % 60, static_cast<int32_t>(i));
    const auto id = loop->submit({"", prompt, sampling}, collectors[i].callback());
    ASSERT_TRUE(id.ok());
    if (generator() % 2 == 0) loop->cancel("req-" + std::to_string(generator() % (i + 1)));
  }
  for (Collector& collector : collectors) collector.wait();
  EXPECT_EQ(loop.finish().num_requests_total, 200);
}

TEST(StepLoop, CancelFromTheCallback) {
  TestLoop loop;
  Collector collector;
  DeltaCallback collect = collector.callback();
  SamplingParams sampling = greedy(100);
  sampling.ignore_eos = true;
  ASSERT_TRUE(loop->submit({"self", {1}, sampling},
                           [&](const Delta& delta) {
                             collect(delta);
                             if (delta.completion_tokens == 3) loop->cancel("self");
                           })
                  .ok());
  EXPECT_EQ(collector.wait().reason(), FinishReason::kAbort);
  EXPECT_EQ(collector.wait().token_ids.size(), 3u);
}

TEST(StepLoop, QueueFullAndIdInUse) {
  Gate gate;
  TestLoop loop(says("abc"),
                {.scheduler = {.max_running_requests = 1, .chunked_prefill_size = 4, .max_prefill_tokens = 8},
                 .max_queued_requests = 2},
                gate.hook());
  Collector running, queued1, queued2, later;
  ASSERT_TRUE(loop->submit({"r", {1}, greedy(2)}, running.callback()).ok());
  gate.wait_until_reached();
  // The running request leaves the queue's count only after its first step.
  Status status;
  int num_accepted = 0;
  while ((status = loop->submit({"", {1}, greedy(2)}, [](const Delta&) {}).status()).ok()) ++num_accepted;
  EXPECT_LE(num_accepted, 2);
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("--max-queued-requests is 2"), std::string::npos) << status.message();
  gate.open();
  running.wait();
  while (loop->stats().num_queue_reqs + loop->stats().num_running_reqs > 0) std::this_thread::yield();
  ASSERT_TRUE(loop->submit({"r", {1}, greedy(2)}, later.callback()).ok()) << "the id is free again";
  later.wait();
}

TEST(StepLoop, AnIdInUseIsRefused) {
  Gate gate;
  TestLoop loop(says("abc"), {}, gate.hook());
  Collector first;
  ASSERT_TRUE(loop->submit({"x", {1}, greedy(2)}, first.callback()).ok());
  EXPECT_EQ(loop->submit({"x", {1}, greedy(2)}, [](const Delta&) {}).status().code(),
            StatusCode::kInvalidArgument);
  gate.open();
  first.wait();
}

TEST(StepLoop, DrainLetsRequestsEndAndRefusesNewOnes) {
  Gate gate;
  TestLoop loop(says("abc"), {}, gate.hook());
  std::vector<Collector> collectors(20);
  for (Collector& collector : collectors)
    ASSERT_TRUE(loop->submit({"", {1}, greedy(9)}, collector.callback()).ok());
  std::thread drainer([&] { loop->drain(60); });
  while (loop->submit({"", {1}, greedy(1)}, [](const Delta&) {}).ok()) std::this_thread::yield();
  gate.open();
  drainer.join();
  for (Collector& collector : collectors) EXPECT_EQ(collector.wait().reason(), FinishReason::kStop);
  EXPECT_EQ(loop->submit({"", {1}, greedy(1)}, [](const Delta&) {}).status().code(),
            StatusCode::kUnavailable);
}

// The requests run two at a time, with 100 steps each of at least 1 ms, and cannot end within the deadline.
TEST(StepLoop, DrainAbortsAfterTheDeadline) {
  TestLoop loop(
      hashed_logits,
      {.scheduler = {.max_running_requests = 2, .chunked_prefill_size = 4, .max_prefill_tokens = 8}},
      [](const Batch&) { std::this_thread::sleep_for(std::chrono::milliseconds(1)); });
  SamplingParams sampling = greedy(100);
  sampling.ignore_eos = true;
  std::vector<Collector> collectors(20);
  for (Collector& collector : collectors)
    ASSERT_TRUE(loop->submit({"", {1}, sampling}, collector.callback()).ok());
  loop->drain(0.01);
  for (Collector& collector : collectors) EXPECT_EQ(collector.wait().reason(), FinishReason::kAbort);
  EXPECT_EQ(loop.finish().num_aborted_requests_total, 20);
  for (const double odd : {-1.0, std::nan(""), 1e300}) loop->drain(odd);
}

TEST(StepLoop, DestructionAbortsWhatRuns) {
  std::vector<Collector> collectors(20);
  {
    TestLoop loop;
    SamplingParams sampling = greedy(120);
    sampling.ignore_eos = true;
    for (Collector& collector : collectors)
      ASSERT_TRUE(loop->submit({"", {1}, sampling}, collector.callback()).ok());
  }
  for (Collector& collector : collectors) {
    const FinishReason reason = collector.wait().reason();
    EXPECT_TRUE(reason == FinishReason::kAbort || reason == FinishReason::kLength);
  }
}

TEST(StepLoop, NanFailsItsOwnRequestOnly) {
  TestLoop loop([](std::span<const int32_t> history, std::span<float> logits) {
    hashed_logits(history, logits);
    if (history[0] == 13 && history.size() == 4) logits[200] = std::nanf("");
  });
  SamplingParams sampling = greedy(10);
  sampling.ignore_eos = true;
  Collector bad, good;
  ASSERT_TRUE(loop->submit({"", {13}, sampling}, bad.callback()).ok());
  ASSERT_TRUE(loop->submit({"", {14}, sampling}, good.callback()).ok());
  EXPECT_EQ(bad.wait().reason(), FinishReason::kError);
  EXPECT_NE(bad.wait().last.error.find("NaN"), std::string::npos);
  EXPECT_EQ(bad.wait().token_ids.size(), 3u);
  EXPECT_EQ(good.wait().token_ids, expected_greedy({14}, 10));
  EXPECT_EQ(loop.finish().num_failed_requests_total, 1);
}

TEST(StepLoop, AStepOutOfMemoryFailsItsRequestsAndNotTheEngine) {
  int num_steps = 0;
  TestLoop loop(says("abc"), {}, [&](const Batch&) {
    if (++num_steps == 2) throw std::bad_alloc();
  });
  const Answer failed = loop.run({'x'}, greedy(9));
  EXPECT_EQ(failed.reason(), FinishReason::kError);
  EXPECT_EQ(failed.text, "a");
  EXPECT_FALSE(failed.last.error.empty());
  EXPECT_EQ(loop.run({'x'}, greedy(9)).text, "abc");
  EXPECT_EQ(loop.finish().num_failed_requests_total, 1);
}

TEST(StepLoop, SubmitFromManyThreads) {
  TestLoop loop(hashed_logits, {.num_pages = 64});
  std::atomic<int> num_ended = 0;
  std::vector<std::thread> clients;
  for (int c = 0; c < 4; ++c)
    clients.emplace_back([&, c] {
      for (int i = 0; i < 50; ++i) {
        const auto id = loop->submit({"", {c, i}, greedy(1 + i % 7)}, [&](const Delta& delta) {
          if (delta.finish_reason != FinishReason::kNone) ++num_ended;
        });
        ASSERT_TRUE(id.ok());
        if (i % 3 == 0) loop->cancel(*id);
        (void)loop->stats();
      }
    });
  for (std::thread& client : clients) client.join();
  loop.finish();
  EXPECT_EQ(num_ended, 200);
}

TEST(StepLoop, ThroughputCountsTheLastSeconds) {
  TestLoop loop(says("abcdefgh"));
  EXPECT_EQ(loop->stats().gen_throughput, 0);
  loop.run({'x'}, greedy(8));
  const EngineStats stats = loop.finish();
  EXPECT_NEAR(stats.gen_throughput * stats.uptime_seconds, 8, 1e-6);
}

// An executor that samples gives the same outputs as the host's sampler for all sampling parameters.
TEST(StepLoop, TokensFromTheExecutorAreThoseOfTheSampler) {
  const std::vector<SamplingParams> asked = {
      greedy(9),
      {.temperature = 0.8f, .top_p = 0.7f, .top_k = 20, .seed = 5, .max_new_tokens = 12},
      {.temperature = 1.2f, .seed = 6, .max_new_tokens = 7, .top_logprobs = 3},
      {.temperature = 0, .max_new_tokens = 5, .top_logprobs = 0}};
  TestLoop host, device(hashed_logits, {.samples = true});
  for (const SamplingParams& sampling : asked) {
    const Answer a = host.run({1, 2, 3}, sampling), b = device.run({1, 2, 3}, sampling);
    EXPECT_EQ(a.token_ids, b.token_ids);
    EXPECT_EQ(a.text, b.text);
    ASSERT_EQ(a.logprobs.size(), b.logprobs.size());
    for (size_t i = 0; i < a.logprobs.size(); ++i) {
      EXPECT_EQ(a.logprobs[i].chosen.logprob, b.logprobs[i].chosen.logprob);
      EXPECT_EQ(a.logprobs[i].chosen.bytes, b.logprobs[i].chosen.bytes);
      ASSERT_EQ(a.logprobs[i].top.size(), b.logprobs[i].top.size());
      for (size_t k = 0; k < a.logprobs[i].top.size(); ++k) {
        EXPECT_EQ(a.logprobs[i].top[k].token_id, b.logprobs[i].top[k].token_id);
        EXPECT_EQ(a.logprobs[i].top[k].bytes, b.logprobs[i].top[k].bytes);
      }
    }
  }
}

// Sequences end by length, at the end token and at stop tokens, are retracted for lack of pages, and are
// cancelled, all while the next step is in flight.
TEST(StepLoop, AnExecutorThatSamplesServesManyAtOnceAsTheSamplerWould) {
  const auto run = [](bool samples) {
    TestLoop loop(hashed_logits, {.num_pages = 40, .samples = samples});
    std::vector<Collector> collectors(60);
    for (size_t i = 0; i < collectors.size(); ++i) {
      std::vector<int32_t> prompt;
      for (size_t k = 0; k <= i * 7 % 50; ++k) prompt.push_back(static_cast<int32_t>(i + k));
      SamplingParams sampling{.temperature = i % 3 == 0 ? 0.0f : 1.0f,
                              .seed = i,
                              .max_new_tokens = static_cast<int64_t>(i * 5 % 60),
                              .ignore_eos = i % 4 == 0};
      if (i % 5 == 0) sampling.stop_token_ids = {1, 50, 100, 150, 200};
      const auto id = loop->submit({"", prompt, sampling}, collectors[i].callback());
      EXPECT_TRUE(id.ok());
      if (i % 10 == 9) loop->cancel(*id);
    }
    std::vector<Answer> answers;
    for (Collector& collector : collectors) answers.push_back(collector.wait());
    loop.finish();
    return answers;
  };
  const std::vector<Answer> host = run(false), device = run(true);
  for (size_t i = 0; i < host.size(); ++i) {
    if (i % 10 == 9) continue;  // its number of tokens is random
    EXPECT_EQ(host[i].token_ids, device[i].token_ids) << i;
    EXPECT_EQ(host[i].text, device[i].text) << i;
    EXPECT_EQ(host[i].reason(), device[i].reason()) << i;
  }
}

TEST(StepLoop, ABadRowOfTheExecutorsFailsItsOwnRequest) {
  const FakeLogits nan_after_7 = [](std::span<const int32_t> history, std::span<float> logits) {
    hashed_logits(history, logits);
    if (history.front() == 7) logits[0] = std::numeric_limits<float>::quiet_NaN();
  };
  TestLoop loop(nan_after_7, {.samples = true});
  const Answer bad = loop.run({7}, greedy(3)), good = loop.run({8}, greedy(3));
  EXPECT_EQ(bad.reason(), FinishReason::kError);
  EXPECT_EQ(bad.last.error, "the model's logits hold NaN or infinity");
  EXPECT_EQ(good.token_ids.size(), 3u);
}

TEST(StepLoop, SamplingThatFailsEndsTheStepsRequests) {
  TestLoop loop(hashed_logits, {.samples = true});
  loop.executor().sample_failure = internal_error("the device");
  const Answer answer = loop.run({8}, greedy(3));
  EXPECT_EQ(answer.reason(), FinishReason::kError);
  EXPECT_EQ(answer.last.error, "the device");
}

}  // namespace
}  // namespace fp4moe
