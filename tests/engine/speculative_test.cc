// Speculative decoding on the demo checkpoints: texts and log-probabilities have the bits of plain decoding.
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <random>
#include <thread>
#include <vector>

#include "engine/demo_engine.h"
#include "io/temp_folder.h"
#include "io/write/make_tiny_eagle3.h"

namespace fp4moe {
namespace {

struct Output {
  std::string text;
  std::vector<int32_t> token_ids;
  std::vector<float> logprobs;  // of each token: its own, then those of the listed ids
  bool operator==(const Output&) const = default;
};

std::future<Output> submit(Engine& engine, Request request) {
  struct State {
    Output output;
    std::promise<Output> done;
  };
  const auto state = std::make_shared<State>();
  auto output = state->done.get_future();
  const auto id = engine.submit(std::move(request), [state](const Delta& delta) {
    Output& out = state->output;
    out.text += delta.text;
    out.token_ids.insert(out.token_ids.end(), delta.token_ids.begin(), delta.token_ids.end());
    for (const PositionLogprobs& position : delta.logprobs) {
      out.logprobs.push_back(position.chosen.logprob);
      for (const TokenLogprob& listed : position.top) out.logprobs.push_back(listed.logprob);
    }
    if (delta.finish_reason == FinishReason::kNone) return;
    EXPECT_NE(delta.finish_reason, FinishReason::kError) << delta.error;
    state->done.set_value(out);
  });
  EXPECT_TRUE(id.ok()) << id.status().to_string();
  return output;
}

// A third of the requests is greedy. The prompts repeat themselves, and so do many outputs.
std::vector<Request> requests(const Engine& engine) {
  std::mt19937 random(7);
  const Result<std::vector<int32_t>> words = engine.tokenize(
      "Question: Tom has 3 apples and buys 4 apples. How many apples does Tom have? Answer:", false);
  EXPECT_TRUE(words.ok());
  std::vector<Request> list;
  for (uint64_t i = 0; i < 32; ++i) {
    Request request;
    for (uint64_t copy = 0; copy <= i % 3; ++copy)
      request.input_ids.insert(request.input_ids.end(), words->begin(),
                               words->end() - static_cast<std::ptrdiff_t>(random() % 5));
    constexpr float kTemperatures[] = {0, 0.7f, 1};
    request.sampling = {.temperature = kTemperatures[i % 3],
                        .seed = i,
                        .max_new_tokens = static_cast<int64_t>(40 + random() % 40),
                        .ignore_eos = true,
                        .top_logprobs = 3};
    if (i % 5 == 4) request.sampling.frequency_penalty = 0.5f;
    list.push_back(std::move(request));
  }
  return list;
}

struct Crowd {
  std::vector<Output> outputs;
  EngineStats stats;
};

Crowd run_crowd(const EngineConfig& config) {
  Crowd run;
  const auto engine = make_engine(config);
  if (engine == nullptr) return run;
  std::vector<std::future<Output>> crowd;
  {
    const Hold hold(*engine);
    for (Request& request : requests(*engine)) crowd.push_back(submit(*engine, std::move(request)));
  }
  for (auto& output : crowd) run.outputs.push_back(output.get());
  engine->drain(60);
  run.stats = engine->stats();
  EXPECT_EQ(run.stats.num_used_tokens, 0);
  EXPECT_EQ(run.stats.num_leaked_pages, 0);
  return run;
}

class Speculation : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Demos, Speculation, ::testing::Values("demo-gptoss-mxfp4", "demo-dsv3-nvfp4"),
                         demo_name);

struct Layout {
  int tp = 1, dp = 1;
  const char* kv_dtype = "auto";
  int64_t max_total_tokens = 8192;  // few: some requests are retracted
  const char* a2a = "none";
  std::string text() const {
    return "tp " + std::to_string(tp) + " dp " + std::to_string(dp) + " KV " + kv_dtype + " pool " +
           std::to_string(max_total_tokens) + " a2a " + a2a;
  }
};

EngineConfig layout_config(const std::string& model, const Layout& layout) {
  EngineConfig config = config_of(model);
  config.device = "cpu";
  config.tp_size = layout.tp;
  config.dp_size = layout.dp;
  config.enable_dp_attention = layout.dp > 1;
  config.kv_cache_dtype = layout.kv_dtype;
  config.max_total_tokens = layout.max_total_tokens;
  config.moe_a2a_backend = layout.a2a;
  config.schedule_conservativeness = 0;
  return config;
}

void expect_plain(const Crowd& drafted, const Crowd& plain, const std::string& what) {
  ASSERT_EQ(plain.outputs.size(), 32u);
  ASSERT_EQ(drafted.outputs.size(), 32u);
  for (size_t i = 0; i < plain.outputs.size(); ++i)
    EXPECT_EQ(drafted.outputs[i], plain.outputs[i]) << "request " << i << " " << what;
  EXPECT_EQ(plain.stats.spec_verify_calls_total, 0);
  EXPECT_GT(drafted.stats.spec_correct_drafts_total, 100) << what;
  EXPECT_GT(drafted.stats.spec_proposed_drafts_total, drafted.stats.spec_correct_drafts_total) << what;
}

const char* other_demo(const std::string& model) {
  return model == "demo-dsv3-nvfp4" ? "demo-gptoss-mxfp4" : "demo-dsv3-nvfp4";
}

std::string demo_path(const std::string& model) { return std::string(FP4MOE_MODELS "/") + model; }

TEST_P(Speculation, OutputsAreThoseOfPlainDecoding) {
  for (const Layout& layout : {Layout{}, Layout{.kv_dtype = "fp8_e4m3"}, Layout{.max_total_tokens = 640},
                               Layout{.tp = 2}, Layout{.tp = 2, .dp = 2}}) {
    EngineConfig config = layout_config(GetParam(), layout);
    const Crowd plain = run_crowd(config);
    config.speculative_algorithm = "NGRAM";
    config.speculative_num_draft_tokens = 6;
    config.speculative_ngram_min_match_window_size = 1;
    const Crowd drafted = run_crowd(config);
    expect_plain(drafted, plain, "NGRAM " + layout.text());
    if (layout.max_total_tokens == 640) {
      EXPECT_GT(drafted.stats.num_retracted_reqs, 0);
    }
  }
}

TEST_P(Speculation, OutputsWithADraftModelAreThoseOfPlainDecoding) {
  for (const Layout& layout : {Layout{}, Layout{.kv_dtype = "fp8_e4m3"}, Layout{.max_total_tokens = 640},
                               Layout{.tp = 4, .a2a = "deepep"}, Layout{.tp = 4, .dp = 2}}) {
    EngineConfig config = layout_config(GetParam(), layout);
    const Crowd plain = run_crowd(config);
    config.speculative_algorithm = "STANDALONE";
    for (const char* draft : {other_demo(GetParam()), GetParam()}) {
      config.speculative_draft_model_path = demo_path(draft);
      config.speculative_num_steps = draft == GetParam() ? 5 : 3;
      expect_plain(run_crowd(config), plain, std::string(draft) + " drafts, " + layout.text());
    }
  }
}

// The draft is then always right: also after a prompt in chunks, and after a prompt whose pages are reused.
TEST_P(Speculation, AModelThatDraftsForItselfIsAlwaysRight) {
  constexpr int64_t kSteps = 3, kOutput = 1 + 10 * (1 + kSteps);
  for (const Layout& layout : {Layout{}, Layout{.tp = 4}}) {
    EngineConfig config = layout_config(GetParam(), layout);
    config.chunked_prefill_size = 7;
    config.speculative_algorithm = "STANDALONE";
    config.speculative_draft_model_path = config.model_path;
    config.speculative_num_steps = kSteps;
    const auto engine = make_engine(config);
    ASSERT_NE(engine, nullptr);
    for (int64_t copy = 0; copy < 3; ++copy) {
      const EngineStats before = engine->stats();
      Request request = requests(*engine)[2];
      // One token: the sequence ends before its prompt's last rows have been extended.
      request.sampling = {.temperature = 0, .max_new_tokens = copy == 0 ? 1 : kOutput, .ignore_eos = true};
      submit(*engine, std::move(request)).get();
      EngineStats after = engine->stats();
      for (; after.num_requests_total == before.num_requests_total; after = engine->stats())
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const int64_t num_steps = copy == 0 ? 0 : 10;
      EXPECT_EQ(after.spec_verify_calls_total - before.spec_verify_calls_total, num_steps) << layout.text();
      EXPECT_EQ(after.spec_correct_drafts_total - before.spec_correct_drafts_total, num_steps * kSteps);
      if (copy > 0) {
        EXPECT_GT(after.cached_tokens_total, before.cached_tokens_total);
      }
    }
  }
}

// The drafts of random heads are hardly ever right, and change no output.
TEST(Eagle3Speculation, OutputsAreThoseOfPlainDecoding) {
  const TempFolder folder;
  const std::string plain_head = folder.file("plain"), shared_head = folder.file("shared");
  const std::string target = demo_path("demo-gptoss-mxfp4");
  for (const auto& [path, changes] :
       {std::pair(plain_head, R"({"fc_norm": true, "norm_output": true, "num_hidden_layers": 2})"),
        std::pair(shared_head, R"({"draft_vocab_size": null, "norm_before_residual": true})")}) {
    const Status made = make_tiny_eagle3(path, {.target = target, .changes = changes});
    ASSERT_TRUE(made.ok()) << made.to_string();
  }
  for (const Layout& layout : {Layout{}, Layout{.kv_dtype = "fp8_e4m3"}, Layout{.max_total_tokens = 640},
                               Layout{.tp = 4, .a2a = "deepep"}, Layout{.tp = 4, .dp = 2}}) {
    EngineConfig config = layout_config("demo-gptoss-mxfp4", layout);
    const Crowd plain = run_crowd(config);
    config.speculative_algorithm = "EAGLE3";
    config.speculative_num_steps = 3;
    for (const std::string& head : {plain_head, shared_head}) {
      config.speculative_draft_model_path = head;
      const Crowd drafted = run_crowd(config);
      ASSERT_EQ(drafted.outputs.size(), plain.outputs.size());
      for (size_t i = 0; i < plain.outputs.size(); ++i)
        EXPECT_EQ(drafted.outputs[i], plain.outputs[i]) << "request " << i << " " << layout.text();
      EXPECT_GT(drafted.stats.spec_proposed_drafts_total, 1000) << layout.text();
    }
  }
}

TEST(Eagle3Speculation, RefusesAnUnfitHeadBeforeWeightsAreRead) {
  const TempFolder folder;
  const std::string target = demo_path("demo-gptoss-mxfp4"), head = folder.file("head");
  const char* changes = R"({"num_attention_heads": 6, "num_key_value_heads": 3})";  // not for 4 ranks
  ASSERT_TRUE(make_tiny_eagle3(head, {.target = target, .changes = changes}).ok());
  const auto refusal = [&](auto change) {
    EngineConfig config = config_of("demo-gptoss-mxfp4");
    config.device = "cpu";
    config.speculative_algorithm = "EAGLE3";
    config.speculative_draft_model_path = head;
    config.progress_sink = [](int64_t, int64_t) { ADD_FAILURE() << "weights were read"; };
    change(config);
    const Result<std::unique_ptr<Engine>> engine = Engine::make(config);
    EXPECT_FALSE(engine.ok());
    return engine.status().message();
  };
  const auto expect = [&](const std::string& message, const char* part) {
    EXPECT_NE(message.find("--speculative-draft-model-path"), std::string::npos) << message;
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  expect(refusal([](EngineConfig& c) { c.speculative_draft_model_path.clear(); }), "EAGLE3");
  expect(refusal([](EngineConfig& c) { c.speculative_draft_model_path = "/none/such"; }), "/none/such");
  expect(refusal([&](EngineConfig& c) { c.speculative_draft_model_path = target; }), "GptOssForCausalLM");
  expect(refusal([&](EngineConfig& c) { c.model_path = demo_path("demo-dsv3-nvfp4"); }), "latent attention");
  expect(refusal([](EngineConfig& c) { c.tp_size = 4, c.ep_size = 4; }), "cannot be split");
}

TEST(SpeculationFlags, WhatIsNotSupportedIsRefusedByName) {
  const auto refusal = [](auto change) {
    EngineConfig config = config_of("demo-gptoss-mxfp4");
    config.device = "cpu";
    config.speculative_algorithm = "NGRAM";
    config.progress_sink = [](int64_t, int64_t) { ADD_FAILURE() << "weights were read"; };
    change(config);
    const Result<std::unique_ptr<Engine>> engine = Engine::make(config);
    EXPECT_FALSE(engine.ok());
    return engine.status().message();
  };
  for (const char* algorithm : {"EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "DFLASH", "ngram"})
    EXPECT_NE(refusal([&](EngineConfig& c) { c.speculative_algorithm = algorithm; }).find(algorithm),
              std::string::npos);
  const auto standalone = [&](auto change) {
    return refusal([&](EngineConfig& c) {
      c.speculative_algorithm = "STANDALONE";
      c.speculative_draft_model_path = demo_path("demo-dsv3-nvfp4");
      change(c);
    });
  };
  EXPECT_NE(standalone([](EngineConfig& c) {
              c.speculative_draft_model_path = "/none/such";
            }).find("--speculative-draft-model-path /none/such"),
            std::string::npos);
  EXPECT_NE(
      standalone([](EngineConfig& c) { c.speculative_eagle_topk = 4; }).find("--speculative-eagle-topk 4"),
      std::string::npos);
  EXPECT_NE(standalone([](EngineConfig& c) { c.speculative_num_steps = 64; }).find("0 to 63"),
            std::string::npos);
  EXPECT_NE(
      standalone([](EngineConfig& c) { c.disaggregation_mode = "prefill"; }).find("--disaggregation-mode"),
      std::string::npos);
  EXPECT_NE(refusal([](EngineConfig& c) { c.disaggregation_mode = "decode"; }).find("--disaggregation-mode"),
            std::string::npos);
  EXPECT_NE(refusal([](EngineConfig& c) { c.speculative_num_draft_tokens = 1; }).find("2 to 64"),
            std::string::npos);
  EXPECT_NE(refusal([](EngineConfig& c) {
              c.speculative_ngram_max_match_window_size = 1;
            }).find("--speculative-ngram-max-match-window-size 1"),
            std::string::npos);
}

}  // namespace
}  // namespace fp4moe
