// Whole models whose requests share prefixes: outputs have the same bits with and without the prefix cache,
// on one rank and on several, with enough pages and with a tenth of them.
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
  bool operator==(const Answer& other) const {
    return token_ids == other.token_ids && logprobs == other.logprobs;
  }
};

std::future<Answer> submit(Engine& engine, std::vector<int32_t> prompt, int64_t num_tokens) {
  auto promise = std::make_shared<std::promise<Answer>>();
  auto answer = std::make_shared<Answer>();
  const SamplingParams sampling{
      .temperature = 0, .max_new_tokens = num_tokens, .ignore_eos = true, .top_logprobs = 0};
  const auto id = engine.submit({"", std::move(prompt), sampling}, [promise, answer](const Delta& delta) {
    answer->token_ids.insert(answer->token_ids.end(), delta.token_ids.begin(), delta.token_ids.end());
    for (const PositionLogprobs& position : delta.logprobs)
      answer->logprobs.push_back(position.chosen.logprob);
    answer->cached_tokens = delta.cached_tokens;
    EXPECT_EQ(delta.error, "");
    if (delta.finish_reason != FinishReason::kNone) promise->set_value(*answer);
  });
  EXPECT_TRUE(id.ok()) << id.status().to_string();
  return promise->get_future();
}

// Three conversations of three turns with a common beginning; every turn contains the previous ones.
std::vector<Answer> converse(Engine& engine) {
  std::mt19937 random(2);
  const auto id = [&] {
    return static_cast<int32_t>(random() % static_cast<uint32_t>(engine.info().vocab_size));
  };
  std::vector<int32_t> beginning(37);
  for (int32_t& token : beginning) token = id();
  std::vector<std::vector<int32_t>> histories(3, beginning);
  std::vector<Answer> answers;
  for (int turn = 0; turn < 3; ++turn) {
    std::vector<std::future<Answer>> coming;
    for (auto& history : histories) {
      for (int n = 0; n < 11; ++n) history.push_back(id());
      coming.push_back(submit(engine, history, 14));
    }
    for (size_t i = 0; i < coming.size(); ++i) {
      answers.push_back(coming[i].get());
      histories[i].insert(histories[i].end(), answers.back().token_ids.begin(),
                          answers.back().token_ids.end());
    }
  }
  engine.drain(60);
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.num_used_pages, 0);
  EXPECT_EQ(stats.num_leaked_pages, 0);
  EXPECT_EQ(stats.num_cached_pages + stats.num_free_pages, stats.num_pages);
  return answers;
}

int64_t num_cached(const std::vector<Answer>& answers) {
  int64_t sum = 0;
  for (const Answer& answer : answers) sum += answer.cached_tokens;
  return sum;
}

class PrefixReuse : public testing::TestWithParam<const char*> {};

// gpt-oss has grouped queries, sinks and sliding windows; DeepSeek-V3 has latent attention.
TEST_P(PrefixReuse, NoBitChanges) {
  EngineConfig config = config_of(GetParam());
  config.disable_radix_cache = true;
  const auto plain = make_engine(config);
  ASSERT_NE(plain, nullptr);
  const std::vector<Answer> expected = converse(*plain);
  EXPECT_EQ(num_cached(expected), 0);
  config.disable_radix_cache = false;
  for (const int chunk : {512, 13}) {
    config.chunked_prefill_size = chunk;
    const auto reusing = make_engine(config);
    ASSERT_NE(reusing, nullptr);
    const std::vector<Answer> answers = converse(*reusing);
    EXPECT_TRUE(answers == expected) << "chunk " << chunk;
    EXPECT_GT(num_cached(answers), 300);
  }
}

// Prompts of several windows of 128 tokens; each begins as the first one does.
std::vector<std::vector<int32_t>> window_prompts() {
  std::mt19937 random(6);
  std::vector<std::vector<int32_t>> prompts;
  for (const size_t length : {300, 411, 128, 129, 143}) {
    std::vector<int32_t> prompt;
    if (!prompts.empty())
      prompt.assign(prompts[0].begin(), prompts[0].begin() + static_cast<long>(length * 2 / 3));
    while (prompt.size() < length) prompt.push_back(static_cast<int32_t>(random() % 250));
    prompts.push_back(prompt);
  }
  return prompts;
}

// Runs each prompt alone, again alone, then all at once.
std::vector<Answer> run_thrice(const EngineConfig& config) {
  std::vector<Answer> answers;
  const auto engine = make_engine(config);
  EXPECT_NE(engine, nullptr);
  const std::vector<std::vector<int32_t>> prompts = window_prompts();
  for (int pass = 0; pass < 2; ++pass)
    for (const auto& prompt : prompts) answers.push_back(submit(*engine, prompt, 20).get());
  std::vector<std::future<Answer>> coming;
  for (const auto& prompt : prompts) coming.push_back(submit(*engine, prompt, 20));
  for (auto& answer : coming) answers.push_back(answer.get());
  engine->drain(60);
  EXPECT_EQ(engine->stats().num_leaked_pages, 0);
  EXPECT_EQ(engine->stats().num_used_window_pages, 0);
  return answers;
}

// Requests continue each other from odd places; window pages are few, so that some are evicted before they
// are reused. Outputs and logprobs are those of engines that hold all tokens in all layers and reuse nothing.
void expect_no_bit_changes_over_windows(EngineConfig config) {
  config.context_length = 512;
  config.disable_radix_cache = config.disable_hybrid_swa_memory = true;
  const std::vector<Answer> expected = run_thrice(config);
  EXPECT_EQ(num_cached(expected), 0);
  config.disable_radix_cache = config.disable_hybrid_swa_memory = false;
  for (const int chunk : {512, 77, 13}) {
    config.chunked_prefill_size = chunk;
    config.page_size = chunk == 77 ? 8 : 16;
    config.max_total_tokens = 2048;
    config.swa_full_tokens_ratio = chunk == 13 ? 0.2 : 0;
    const std::vector<Answer> answers = run_thrice(config);
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(answers[i] == expected[i]) << "chunk " << chunk << " answer " << i;
    EXPECT_GT(num_cached(answers), chunk == 13 ? 400 : 1000) << "chunk " << chunk;
  }
}

TEST_P(PrefixReuse, NoBitChangesOverSeveralWindows) {
  expect_no_bit_changes_over_windows(config_of(GetParam()));
}

TEST_P(PrefixReuse, NoBitChangesOverSeveralWindowsOfCodes) {
  EngineConfig config = config_of(GetParam());
  config.kv_cache_dtype = "fp8_e4m3";
  expect_no_bit_changes_over_windows(config);
}

TEST_P(PrefixReuse, NoBitChangesOverSeveralWindowsInGroupsOfRanks) {
  EngineConfig config = config_of(GetParam());
  config.context_length = 512;
  config.fabric = "threads";
  config.tp_size = 4;
  config.dp_size = 2;
  config.enable_dp_attention = config.enable_deterministic_inference = true;
  config.comm_timeout = 300;
  config.threads = 4;
  config.disable_radix_cache = config.disable_hybrid_swa_memory = true;
  const std::vector<Answer> expected = run_thrice(config);
  config.disable_radix_cache = config.disable_hybrid_swa_memory = false;
  config.chunked_prefill_size = 45;
  const std::vector<Answer> answers = run_thrice(config);
  EXPECT_TRUE(answers == expected);
  EXPECT_GT(num_cached(answers), 500);
}

// Each group has its own pages and prefix cache.
TEST_P(PrefixReuse, NoBitChangesInGroupsOfRanks) {
  EngineConfig config = config_of(GetParam());
  config.fabric = "threads";
  config.tp_size = config.dp_size = 2;
  config.enable_dp_attention = true;
  config.comm_timeout = 300;
  config.disable_radix_cache = true;
  const auto plain = make_engine(config);
  ASSERT_NE(plain, nullptr);
  const std::vector<Answer> expected = converse(*plain);
  config.disable_radix_cache = false;
  const auto reusing = make_engine(config);
  ASSERT_NE(reusing, nullptr);
  const std::vector<Answer> answers = converse(*reusing);
  EXPECT_TRUE(answers == expected);
  EXPECT_GT(num_cached(answers), 100);
}

// All requests at once in a pool with a tenth of the pages that they need.
TEST_P(PrefixReuse, ATenthOfThePagesChangesNoBit) {
  constexpr int kRequests = 12;
  constexpr int64_t kAnswer = 32;
  std::mt19937 random(4);
  std::vector<std::vector<int32_t>> prompts(kRequests);
  for (auto& prompt : prompts)
    for (int n = 0; n < 24; ++n) prompt.push_back(static_cast<int32_t>(random() % 250));
  EngineConfig config = config_of(GetParam());
  config.schedule_conservativeness = 0;
  std::vector<Answer> alone;
  {
    const auto roomy = make_engine(config);
    ASSERT_NE(roomy, nullptr);
    for (const auto& prompt : prompts) alone.push_back(submit(*roomy, prompt, kAnswer).get());
  }
  config.max_total_tokens = kRequests * (24 + kAnswer) / 10;
  const auto tight = make_engine(config);
  ASSERT_NE(tight, nullptr);
  std::vector<std::future<Answer>> coming;
  {
    const Hold hold(*tight);
    for (const auto& prompt : prompts) coming.push_back(submit(*tight, prompt, kAnswer));
  }
  for (size_t i = 0; i < coming.size(); ++i) EXPECT_TRUE(coming[i].get() == alone[i]) << "request " << i;
  tight->drain(60);
  EXPECT_GT(tight->stats().num_retracted_reqs, 0);
  EXPECT_EQ(tight->stats().num_leaked_pages, 0);
}

INSTANTIATE_TEST_SUITE_P(Demos, PrefixReuse, testing::Values("demo-gptoss-mxfp4", "demo-dsv3-nvfp4"),
                         demo_name);

}  // namespace
}  // namespace fp4moe
