// Whole models: the reported experts match the routers' counters, and do not depend on other requests.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <future>
#include <numeric>
#include <random>
#include <set>

#include "engine/demo_engine.h"

namespace fp4moe {
namespace {

constexpr int64_t kAnswer = 14;

using Experts = std::vector<int32_t>;

std::vector<int32_t> prompt_of(int seed, int length) {
  std::mt19937 random(static_cast<uint32_t>(seed));
  std::vector<int32_t> prompt;
  for (int n = 0; n < length; ++n) prompt.push_back(static_cast<int32_t>(random() % 250));
  return prompt;
}

std::future<Experts> submit(Engine& engine, std::vector<int32_t> prompt, int64_t from) {
  auto promise = std::make_shared<std::promise<Experts>>();
  Request request{.input_ids = std::move(prompt), .routed_experts_from = from};
  request.sampling = {.temperature = 0, .max_new_tokens = kAnswer, .ignore_eos = true};
  const auto id = engine.submit(std::move(request), [promise](const Delta& delta) {
    if (delta.finish_reason == FinishReason::kNone) return;
    EXPECT_EQ(delta.error, "");
    EXPECT_NE(delta.routed_experts, nullptr);
    promise->set_value(delta.routed_experts ? *delta.routed_experts : Experts());
  });
  EXPECT_TRUE(id.ok()) << id.status().to_string();
  return promise->get_future();
}

class RoutedExpertsTest : public testing::TestWithParam<const char*> {};

TEST_P(RoutedExpertsTest, AreThoseThatTheRoutersCount) {
  const auto engine = make_engine(config_of(GetParam()));
  ASSERT_NE(engine, nullptr);
  const ExpertLoad before = engine->expert_load();
  const Experts ids = submit(*engine, prompt_of(1, 53), 0).get();
  const ExpertLoad after = engine->expert_load();
  const int64_t k = engine->info().top_k, num_layers = engine->info().num_layers;
  ASSERT_EQ(std::ssize(ids), (53 + kAnswer - 1) * num_layers * k);
  std::vector<int64_t> counts(after.tokens.size());
  for (int64_t place = 0; place * k < std::ssize(ids); ++place) {
    const std::set<int32_t> chosen(ids.begin() + place * k, ids.begin() + (place + 1) * k);
    const auto found = std::ranges::find(after.layers, place % num_layers);
    if (found == after.layers.end()) {
      EXPECT_EQ(chosen, std::set<int32_t>{0});
      continue;
    }
    EXPECT_EQ(std::ssize(chosen), k);
    for (const int32_t id : chosen)
      ++counts.at(static_cast<size_t>((found - after.layers.begin()) * after.num_experts + id));
  }
  for (size_t i = 0; i < counts.size(); ++i) EXPECT_EQ(counts[i], after.tokens[i] - before.tokens[i]) << i;
}

// The reported experts do not depend on chunking, shared prefixes, concurrent requests, retraction, or the
// use of two ranks in one group or two.
TEST_P(RoutedExpertsTest, AreTheSameHoweverTheyAreComputed) {
  EngineConfig config = config_of(GetParam());
  const auto plain = make_engine(config);
  ASSERT_NE(plain, nullptr);
  std::vector<Experts> expected;
  for (int i = 0; i < 6; ++i) expected.push_back(submit(*plain, prompt_of(i, 40 + i), 0).get());
  const int64_t row = plain->info().top_k * plain->info().num_layers;
  EXPECT_EQ(submit(*plain, prompt_of(2, 42), 20).get(),
            Experts(expected[2].begin() + 20 * row, expected[2].end()));

  std::vector<EngineConfig> others(4, config);
  others[0].chunked_prefill_size = 13;
  others[0].max_running_requests = 5;
  others[1].max_total_tokens = 13 * others[1].page_size;  // too few for two whole requests
  others[1].schedule_conservativeness = 0;
  for (size_t c = 2; c < 4; ++c) {
    others[c].fabric = "threads";
    others[c].tp_size = 2;
    others[c].comm_timeout = 300;
  }
  others[3].dp_size = 2;
  others[3].enable_dp_attention = true;
  for (size_t c = 0; c < others.size(); ++c) {
    const auto engine = make_engine(others[c]);
    ASSERT_NE(engine, nullptr);
    std::vector<std::future<Experts>> coming;
    {
      const Hold hold(*engine);
      for (int i = 0; i < 6; ++i) coming.push_back(submit(*engine, prompt_of(i, 40 + i), 0));
    }
    for (size_t i = 0; i < coming.size(); ++i) {
      const Experts ids = coming[i].get();
      ASSERT_EQ(ids.size(), expected[i].size());
      if (c == 2) {  // sums in another order, which can change the choice between close logits
        const auto num_equal = std::inner_product(ids.begin(), ids.end(), expected[i].begin(), 0,
                                                  std::plus<>(), std::equal_to<>());
        EXPECT_GT(num_equal, std::ssize(ids) * 9 / 10) << "request " << i;
      } else {
        EXPECT_EQ(ids, expected[i]) << c << ", request " << i;
      }
    }
    engine->drain(60);
    if (c == 1) {
      EXPECT_GT(engine->stats().num_retracted_reqs, 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Demos, RoutedExpertsTest, testing::Values("demo-gptoss-mxfp4", "demo-dsv3-nvfp4"),
                         demo_name);

}  // namespace
}  // namespace fp4moe
