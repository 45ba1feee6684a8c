// The whole engine on the demo checkpoint.
#include "fp4moe/engine.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <random>

#include "engine/demo_engine.h"

namespace fp4moe {
namespace {

const std::string kModelPath = FP4MOE_MODELS "/demo-gptoss-mxfp4";

EngineConfig demo_config() {
  EngineConfig config = config_of("demo-gptoss-mxfp4");
  config.max_total_tokens = 1024;
  return config;
}

std::unique_ptr<Engine> make_demo() { return make_engine(demo_config()); }

using Tokens = std::vector<int32_t>;

std::future<Tokens> submit(Engine& engine, Tokens prompt, const SamplingParams& sampling) {
  auto promise = std::make_shared<std::promise<Tokens>>();
  auto tokens = std::make_shared<Tokens>();
  const auto id = engine.submit({"", std::move(prompt), sampling}, [promise, tokens](const Delta& delta) {
    tokens->insert(tokens->end(), delta.token_ids.begin(), delta.token_ids.end());
    EXPECT_EQ(delta.error, "");
    if (delta.finish_reason != FinishReason::kNone) promise->set_value(*tokens);
  });
  EXPECT_TRUE(id.ok()) << id.status().to_string();
  return promise->get_future();
}

SamplingParams greedy(int64_t max_new_tokens) {
  return {.temperature = 0, .max_new_tokens = max_new_tokens, .ignore_eos = true};
}

TEST(Engine, DescribesTheModel) {
  const auto engine = make_demo();
  ASSERT_NE(engine, nullptr);
  const ModelInfo& info = engine->info();
  EXPECT_EQ(info.name, "demo-gptoss-mxfp4");
  EXPECT_EQ(info.architecture, "GptOssForCausalLM");
  EXPECT_EQ(info.quantization, "mxfp4");
  EXPECT_GT(info.weight_bytes, 0);
  EXPECT_EQ(info.max_total_tokens, 1024);
  EXPECT_GE(info.startup_lines.size(), 8u);
  for (const std::string& line : info.startup_lines) EXPECT_EQ(line.find('\n'), std::string::npos);
  EXPECT_GT(engine->stats().load_seconds, 0);
}

TEST(Engine, TextToIdsAndBack) {
  const auto engine = make_demo();
  ASSERT_NE(engine, nullptr);
  const std::string text = "Tom has 3 apples.";
  const auto ids = engine->tokenize(text, false);
  ASSERT_TRUE(ids.ok());
  EXPECT_EQ(*engine->detokenize(*ids, true), text);
  std::string bytes;
  for (const int32_t id : *ids) bytes += engine->token_bytes(id);
  EXPECT_EQ(bytes, text);
  EXPECT_EQ(engine->detokenize({-1}, true).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(engine->detokenize({static_cast<int32_t>(engine->info().vocab_size)}, true).status().code(),
            StatusCode::kInvalidArgument);
}

// Prompts give the same tokens alone and all together, with other chunk and page sizes and with a pool that
// is too small for all of them.
TEST(Engine, GreedyTokensAreIndependentOfTheCrowd) {
  std::mt19937 generator(1);
  std::vector<Tokens> prompts(6), alone;
  {
    const auto engine = make_demo();
    ASSERT_NE(engine, nullptr);
    for (size_t i = 0; i < prompts.size(); ++i) {
      for (size_t n = 1 + i * 7; n > 0; --n)
        prompts[i].push_back(
            static_cast<int32_t>(generator() % static_cast<uint32_t>(engine->info().vocab_size)));
      alone.push_back(submit(*engine, prompts[i], greedy(12)).get());
      EXPECT_EQ(alone.back().size(), 12u);
    }
  }
  int64_t num_retracted = 0;
  for (const int chunk : {1, 5, 64}) {
    EngineConfig config = demo_config();
    config.chunked_prefill_size = chunk;
    config.max_prefill_tokens = 2 * chunk + 1;
    config.page_size = chunk == 5 ? 3 : 8;
    config.max_total_tokens = chunk == 64 ? 1024 : 72;
    config.schedule_conservativeness = 0;  // reserves nothing for output, so some requests are retracted
    const auto engine = make_engine(config);
    ASSERT_NE(engine, nullptr);
    std::vector<std::future<Tokens>> crowd;
    {
      const Hold hold(*engine);
      for (const Tokens& prompt : prompts) crowd.push_back(submit(*engine, prompt, greedy(12)));
    }
    for (size_t i = 0; i < crowd.size(); ++i)
      EXPECT_EQ(crowd[i].get(), alone[i]) << "prompt " << i << " chunk " << chunk;
    engine->drain(60);
    EXPECT_EQ(engine->stats().num_used_tokens, 0);
    num_retracted += engine->stats().num_retracted_reqs;
  }
  EXPECT_GT(num_retracted, 0);
}

TEST(Engine, RefusesBeforeLoading) {
  const auto refusal = [](auto change) {
    EngineConfig config = demo_config();
    config.progress_sink = [](int64_t, int64_t) { ADD_FAILURE() << "weights were read"; };
    change(config);
    Result<std::unique_ptr<Engine>> engine = Engine::make(config);
    EXPECT_FALSE(engine.ok());
    EXPECT_FALSE(engine.status().message().empty());
    return engine.status().code();
  };
  EXPECT_EQ(refusal([](auto& c) { c.model_path = "/nonexistent"; }), StatusCode::kNotFound);
  EXPECT_EQ(refusal([](auto& c) { c.model_path = ""; }), StatusCode::kNotFound);
  EXPECT_EQ(refusal([](auto& c) { c.quantization = "modelopt_fp4"; }), StatusCode::kUnsupported);
  EXPECT_EQ(refusal([](auto& c) { c.quantization = "int8"; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(refusal([](auto& c) { c.dtype = "float16"; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(refusal([](auto& c) { c.fp4_compute = "w4a4"; }), StatusCode::kUnsupported);
  EXPECT_EQ(refusal([](auto& c) { c.moe_runner_backend = "no-such"; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(refusal([](auto& c) { c.page_size = 0; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(refusal([](auto& c) { c.mem_fraction_static = 0; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(refusal([](auto& c) { c.mem_fraction_static = 1e-6; }), StatusCode::kDoesNotFit);
  EXPECT_EQ(refusal([](auto& c) { c.context_length = int64_t{1} << 30; }), StatusCode::kDoesNotFit);
  EXPECT_EQ(refusal([](auto& c) { c.chat_template = "/nonexistent"; }), StatusCode::kNotFound);
  EXPECT_EQ(refusal([](auto& c) { c.tokenizer_path = "/nonexistent"; }), StatusCode::kNotFound);
}

// A sink may refer to objects that live only as long as its engine.
TEST(Engine, ItsLogSinkEndsWithIt) {
  std::string first, second;
  const auto made = [](std::string& text) {
    EngineConfig config = demo_config();
    config.log_sink = [&text](LogLevel, const std::string& line) { text += line; };
    return make_engine(config);
  };
  const auto engine = made(first);
  auto other = made(second);
  const auto silent = make_demo();
  EXPECT_NE(first, "");
  EXPECT_NE(second, "");
  other.reset();
  const size_t size = second.size();
  first.clear();
  EXPECT_TRUE(engine->update_weights({kModelPath, "second"}, false).ok());
  EXPECT_NE(first, "");
  EXPECT_EQ(second.size(), size);
}

// The progress of all ranks together ends at its total, which is near what they load: no step is large.
TEST(Engine, ProgressOfLoadingEndsAtItsTotal) {
  for (const auto& [tp, a2a] : {std::pair{1, "none"}, {2, "none"}, {4, "deepep"}}) {
    SCOPED_TRACE(testing::Message() << "tp " << tp << " " << a2a);
    EngineConfig config = demo_config();
    config.tp_size = tp;
    config.moe_a2a_backend = a2a;
    config.weight_cache_dir = "none";
    std::vector<double> shares{0};
    config.progress_sink = [&](int64_t done, int64_t total) {
      shares.push_back(static_cast<double>(done) / static_cast<double>(total));
    };
    ASSERT_NE(make_engine(config), nullptr);
    EXPECT_EQ(shares.back(), 1);
    for (size_t i = 1; i < shares.size(); ++i) {
      EXPECT_LE(shares[i], 1);
      EXPECT_LE(shares[i] - shares[i - 1], 0.25) << i << " of " << shares.size();
    }
  }
}

// A callback that throws ends its request; neither the other requests nor the engine.
TEST(Engine, CallbacksMayThrow) {
  EngineConfig config = demo_config();
  config.log_sink = [](LogLevel, const std::string&) { throw std::runtime_error("no log"); };
  config.progress_sink = [](int64_t, int64_t) { throw std::runtime_error("no progress"); };
  const auto engine = make_engine(config);
  ASSERT_NE(engine, nullptr);
  std::promise<Delta> last;
  std::future<Tokens> other;
  {
    const Hold hold(*engine);
    other = submit(*engine, {5, 6}, greedy(40));
    EXPECT_TRUE(engine
                    ->submit({"", {5, 6, 7}, greedy(40)},
                             [&](const Delta& delta) {
                               if (delta.finish_reason != FinishReason::kNone) last.set_value(delta);
                               throw std::runtime_error("no room");
                             })
                    .ok());
  }
  const Delta delta = last.get_future().get();
  EXPECT_EQ(delta.finish_reason, FinishReason::kError);
  EXPECT_EQ(delta.error, "the callback has thrown: no room");
  EXPECT_EQ(delta.completion_tokens, 1);
  EXPECT_EQ(other.get().size(), 40u);
  EXPECT_TRUE(engine->failure().ok());
  engine->drain(10);
  EXPECT_EQ(engine->stats().num_used_pages, 0);
}

TEST(Engine, AModelWithoutAChatTemplateAnswersAllButChat) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::path(testing::TempDir()) / "fp4moe_engine_test_no_template";
  fs::remove_all(folder);
  fs::create_directories(folder);
  for (const char* file : {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"})
    fs::create_symlink(fs::path(kModelPath) / file, folder / file);
  EngineConfig config = demo_config();
  config.model_path = folder.string() + "/";
  const auto engine = make_engine(config);
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(engine->info().name, "fp4moe_engine_test_no_template");
  EXPECT_EQ(engine->apply_chat_template("[]", {}).status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(submit(*engine, {1, 2, 3}, greedy(2)).get().size(), 2u);
  fs::remove_all(folder);
}

}  // namespace
}  // namespace fp4moe
