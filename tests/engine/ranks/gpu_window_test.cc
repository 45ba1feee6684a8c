// The whole engine on a GPU, with prompts of several windows: separate pages for window layers change no bit
// of the outputs, in graphs and launched kernel by kernel, with and without the prefix cache.
#include <gtest/gtest.h>

#include <future>
#include <random>

#include "engine/demo_engine.h"

namespace fp4moe {
namespace {

struct Answer {
  std::vector<int32_t> token_ids;
  std::vector<float> logprobs;
  int64_t cached_tokens = 0;
};

Answer run(Engine& engine, const std::vector<int32_t>& prompt) {
  std::promise<void> done;
  Answer answer;
  const SamplingParams sampling{
      .temperature = 0, .max_new_tokens = 60, .ignore_eos = true, .top_logprobs = 0};
  const auto id = engine.submit({"", prompt, sampling}, [&](const Delta& delta) {
    answer.token_ids.insert(answer.token_ids.end(), delta.token_ids.begin(), delta.token_ids.end());
    for (const PositionLogprobs& position : delta.logprobs)
      answer.logprobs.push_back(position.chosen.logprob);
    answer.cached_tokens = delta.cached_tokens;
    EXPECT_EQ(delta.error, "");
    if (delta.finish_reason != FinishReason::kNone) done.set_value();
  });
  EXPECT_TRUE(id.ok()) << id.status().to_string();
  if (id.ok()) done.get_future().wait();
  return answer;
}

// The prompts one after the other, the second time with what the first time has left in the prefix cache.
std::vector<Answer> run_twice(const EngineConfig& config) {
  std::mt19937 random(9);
  std::vector<std::vector<int32_t>> prompts;
  for (const size_t length : {411, 127, 300}) {
    prompts.emplace_back();
    while (prompts.back().size() < length) prompts.back().push_back(static_cast<int32_t>(random() % 250));
  }
  std::vector<Answer> answers;
  const auto engine = make_engine(config);
  if (engine == nullptr) return answers;
  for (int pass = 0; pass < 2; ++pass)
    for (const auto& prompt : prompts) answers.push_back(run(*engine, prompt));
  engine->drain(60);
  EXPECT_EQ(engine->stats().num_leaked_pages, 0);
  EXPECT_EQ(engine->stats().num_window_pages > 0, !config.disable_hybrid_swa_memory);
  return answers;
}

EngineConfig gpu_config() {
  EngineConfig config = config_of("demo-gptoss-mxfp4");
  config.device = "cuda";
  config.context_length = 1024;
  config.page_size = 16;
  config.max_running_requests = 4;
  config.disable_autotune = true;
  return config;
}

void expect_equal(const std::vector<Answer>& a, const std::vector<Answer>& b) {
  ASSERT_EQ(a.size(), 6u);
  ASSERT_EQ(b.size(), 6u);
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].token_ids, b[i].token_ids) << i;
    EXPECT_EQ(a[i].logprobs, b[i].logprobs) << i;
  }
}

TEST(GpuWindow, SeparatePagesChangeNoBit) {
  for (const int64_t chunk : {512, 77})
    for (const bool graphs : {true, false}) {
      EngineConfig config = gpu_config();
      config.chunked_prefill_size = config.max_prefill_tokens = chunk;
      config.disable_cuda_graph = !graphs;
      config.disable_radix_cache = config.disable_hybrid_swa_memory = true;
      const std::vector<Answer> expected = run_twice(config);
      config.disable_hybrid_swa_memory = false;
      config.swa_full_tokens_ratio = 0.2;  // 52 pages: a prompt of 411 tokens in one step needs 34
      expect_equal(run_twice(config), expected);
    }
}

// With --enable-deterministic-inference, reused prefixes change no bit either.
TEST(GpuWindow, AReusedPrefixChangesNoBit) {
  EngineConfig config = gpu_config();
  config.enable_deterministic_inference = true;
  config.chunked_prefill_size = 77;
  config.disable_radix_cache = config.disable_hybrid_swa_memory = true;
  const std::vector<Answer> expected = run_twice(config);
  config.disable_radix_cache = config.disable_hybrid_swa_memory = false;
  const std::vector<Answer> answers = run_twice(config);
  expect_equal(answers, expected);
  int64_t num_cached = 0;
  for (const Answer& answer : answers) num_cached += answer.cached_tokens;
  EXPECT_EQ(num_cached, 400 + 112 + 288);
}

}  // namespace
}  // namespace fp4moe
