// EAGLE-3 heads on the first demo checkpoint: outputs have the bits of plain decoding.
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "engine/speculative_crowd.h"
#include "io/temp_folder.h"
#include "io/write/make_tiny_eagle3.h"

namespace fp4moe {
namespace {

// The drafts of random heads are hardly ever right, and change no output.
TEST(Eagle3Drafts, OutputsAreThoseOfPlainDecoding) {
  const TempFolder folder;
  const std::string plain_head = folder.file("plain"), shared_head = folder.file("shared");
  const std::string target = FP4MOE_MODELS "/demo-gptoss-mxfp4";
  for (const auto& [path, changes] :
       {std::pair(plain_head, R"({"fc_norm": true, "norm_output": true, "num_hidden_layers": 2})"),
        std::pair(shared_head, R"({"draft_vocab_size": null, "norm_before_residual": true})")}) {
    const Status made = make_tiny_eagle3(path, {.target = target, .changes = changes});
    ASSERT_TRUE(made.ok()) << made.to_string();
  }
  struct Layout {
    const char* name;
    void (*set)(EngineConfig& config);
  };
  const Layout layouts[] = {
      {"one rank", [](EngineConfig&) {}},
      {"fp8 pages", [](EngineConfig& c) { c.kv_cache_dtype = "fp8_e4m3"; }},
      {"few pages", [](EngineConfig& c) { c.max_total_tokens = 640; }},  // some requests are retracted
      {"tp 4", [](EngineConfig& c) { c.tp_size = 4, c.moe_a2a_backend = "deepep"; }},
      {"tp 4 dp 2", [](EngineConfig& c) { c.tp_size = 4, c.dp_size = 2, c.enable_dp_attention = true; }}};
  for (const Layout& layout : layouts) {
    EngineConfig config = config_of("demo-gptoss-mxfp4");
    config.device = "cpu";
    config.max_total_tokens = 8192;
    config.schedule_conservativeness = 0;
    layout.set(config);
    const Crowd plain = run_crowd(config);
    config.speculative_algorithm = "EAGLE3";
    config.speculative_num_steps = 3;
    for (const std::string& head : {plain_head, shared_head}) {
      config.speculative_draft_model_path = head;
      const Crowd drafted = run_crowd(config);
      ASSERT_EQ(drafted.outputs.size(), plain.outputs.size());
      for (size_t i = 0; i < plain.outputs.size(); ++i)
        EXPECT_EQ(drafted.outputs[i], plain.outputs[i]) << "request " << i << " " << layout.name;
      EXPECT_GT(drafted.stats.spec_proposed_drafts_total, 1000) << layout.name;
    }
  }
}

TEST(Eagle3Drafts, RefusesAnUnfitHeadBeforeWeightsAreRead) {
  const TempFolder folder;
  const std::string target = FP4MOE_MODELS "/demo-gptoss-mxfp4", head = folder.file("head");
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
  expect(refusal([&](EngineConfig& c) { c.model_path = FP4MOE_MODELS "/demo-dsv3-nvfp4"; }),
         "latent attention");
  expect(refusal([](EngineConfig& c) { c.tp_size = 4, c.ep_size = 4; }), "cannot be split");
}

}  // namespace
}  // namespace fp4moe
