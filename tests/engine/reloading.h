// Engines on two random checkpoints of one form, whose weights are replaced while they run.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "engine/speculative_crowd.h"
#include "io/checkpoint/checkpoint.h"
#include "io/small_model.h"
#include "io/status_matchers.h"
#include "io/temp_folder.h"
#include "io/write/make_tiny_eagle3.h"
#include "support/eventually.h"

namespace fp4moe {

struct ReloadCase {
  const char* like;
  const char* dialect = "auto";
  int tp = 1, ep = 1, dp = 1;
  const char* a2a = "none";
  const char* kv_cache_dtype = "auto";
  const char* dense_quant = "none";
  const char* drafts = "none";  // a speculative algorithm; separate draft models do not change
  int num_redundant = 0;        // experts; not 0: experts are moved between the updates
};

inline std::string reload_name(const testing::TestParamInfo<ReloadCase>& info) {
  const ReloadCase& c = info.param;
  std::string name = std::string(c.like) + "_" + c.dialect + "_tp" + std::to_string(c.tp) + "_dp" +
                     std::to_string(c.dp) + "_" + c.a2a + "_" + c.kv_cache_dtype + "_" + c.dense_quant +
                     (c.drafts != std::string("none") ? std::string("_") + c.drafts : "") +
                     (c.num_redundant > 0 ? "_placed" : "");
  std::ranges::replace(name, '-', '_');
  return name;
}

class Reloading : public testing::TestWithParam<ReloadCase> {
 protected:
  void make_models(const ReloadCase& c) {
    for (const std::string name : {"a", "b"}) {
      MakeTinyOptions options = small_model(c.like);
      options.dialect = c.dialect;
      options.seed = static_cast<uint64_t>(name[0]);
      options.hidden_size = 128;
      options.num_kv_heads = 4;
      options.num_experts = 8;
      options.vocab_size = 259;  // every id has a token
      if (c.drafts == std::string("NEXTN")) options.num_mtp_layers = 1;
      ASSERT_TRUE(is_ok(make_tiny(folder_.file(name), options)));
    }
    if (c.drafts == std::string("EAGLE3")) {
      ASSERT_TRUE(is_ok(make_tiny_eagle3(folder_.file("head"), {.target = folder_.file("a")})));
    }
  }

  EngineConfig config_of_case(const ReloadCase& c, const std::string& device) const {
    EngineConfig config;
    config.model_path = folder_.file("a");
    config.device = device;
    config.enable_deterministic_inference = device == "cuda";  // outputs do not depend on the batch
    config.threads = 2;
    config.page_size = 8;
    config.context_length = 512;
    config.max_total_tokens = 16384;
    config.disable_autotune = true;
    config.weight_cache_dir = "none";
    config.tp_size = c.tp;
    config.ep_size = c.ep;
    config.dp_size = c.dp;
    config.enable_dp_attention = c.dp > 1;
    config.moe_a2a_backend = c.a2a;
    config.kv_cache_dtype = c.kv_cache_dtype;
    config.dense_quant = c.dense_quant;
    config.speculative_algorithm = c.drafts;
    if (config.speculative_algorithm == "EAGLE3") config.speculative_draft_model_path = folder_.file("head");
    if (config.speculative_algorithm == "STANDALONE") config.speculative_draft_model_path = folder_.file("b");
    config.ep_num_redundant_experts = c.num_redundant;
    config.enable_eplb = c.num_redundant > 0;
    config.eplb_rebalance_num_iterations = 0;
    return config;
  }

  // All outputs and log-probabilities, of greedy requests that run together.
  static std::vector<Output> outputs_of(Engine& engine) {
    std::vector<std::future<Output>> running;
    for (int32_t i = 0; i < 6; ++i) {
      Request request;
      for (int32_t k = 0; k < 9 + 3 * i; ++k) request.input_ids.push_back(3 + (17 * i + 5 * k) % 250);
      request.sampling = {.temperature = 0, .max_new_tokens = 12, .ignore_eos = true, .top_logprobs = 3};
      running.push_back(submit(engine, std::move(request)));
    }
    std::vector<Output> outputs;
    for (std::future<Output>& output : running) outputs.push_back(output.get());
    return outputs;
  }

  // The correct drafts of all requests that have ended.
  static int64_t num_correct_drafts(Engine& engine) {
    EXPECT_TRUE(eventually([&] { return engine.stats().num_running_reqs == 0; }));
    return engine.stats().spec_correct_drafts_total;
  }

  // After every update the outputs are those of an engine that has started on the checkpoint, bit for bit,
  // and so are the drafts.
  void check_updates(EngineConfig config) {
    std::vector<Output> fresh[2];
    int64_t fresh_drafts[2] = {}, num_moved = 0;
    for (const int which : {1, 0}) {
      config.model_path = folder_.file(which == 0 ? "a" : "b");
      const auto engine = make_engine(config);
      ASSERT_NE(engine, nullptr);
      fresh[which] = outputs_of(*engine);
      fresh_drafts[which] = num_correct_drafts(*engine);
    }
    ASSERT_NE(fresh[0], fresh[1]);
    const auto engine = make_engine(config);
    EXPECT_EQ(outputs_of(*engine), fresh[0]);
    for (const int which : {1, 1, 0, 1}) {
      if (config.enable_eplb) {
        const Result<ExpertMoves> moves = engine->rebalance_experts();
        ASSERT_TRUE(is_ok(moves.status()));
        num_moved += moves->num_experts;
      }
      const int64_t drafts_before = num_correct_drafts(*engine);
      const WeightSource source{folder_.file(which == 0 ? "a" : "b"), std::to_string(which)};
      const Result<int64_t> updated = engine->update_weights(source, /*aborts=*/false);
      ASSERT_TRUE(is_ok(updated.status()));
      EXPECT_EQ(engine->weight_source().model_path, source.model_path);
      EXPECT_EQ(engine->weight_source().version, source.version);
      EXPECT_EQ(engine->stats().num_cached_pages, 0);
      EXPECT_EQ(outputs_of(*engine), fresh[which]);
      EXPECT_EQ(num_correct_drafts(*engine) - drafts_before, fresh_drafts[which]);
      EXPECT_EQ(outputs_of(*engine), fresh[which]) << "with cached pages";
    }
    EXPECT_EQ(num_moved > 0, config.enable_eplb);
    if (config.speculative_algorithm == "STANDALONE") {
      EXPECT_GT(fresh_drafts[1], fresh_drafts[0]) << "the draft model is checkpoint b";
    }
  }

  // Overwrites a value of the checkpoint's last norm with NaN.
  static void damage(const std::string& folder) {
    const Result<Checkpoint> checkpoint = Checkpoint::open(folder);
    ASSERT_TRUE(is_ok(checkpoint.status()));
    const TensorEntry* norm = checkpoint->find("model.norm.weight");
    ASSERT_NE(norm, nullptr);
    std::fstream file(folder + "/" + norm->file, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(norm->file_offset);
    file.write("\xC0\x7F", 2);
    ASSERT_TRUE(file.flush().good());
  }

  // The checkpoint is damaged after all ranks have checked it, when the first of them has replaced weights.
  void check_failure(EngineConfig config) {
    const auto is_armed = std::make_shared<std::atomic<bool>>(false);
    config.progress_sink = [is_armed, folder = folder_.file("b")](int64_t, int64_t) {
      if (is_armed->exchange(false)) damage(folder);
    };
    const auto engine = make_engine(config);
    ASSERT_NE(engine, nullptr);
    outputs_of(*engine);
    is_armed->store(true);
    const Status failed = engine->update_weights({folder_.file("b")}, false).status();
    EXPECT_FALSE(is_armed->load()) << "no weight was replaced";
    for (const Status& status : {failed, engine->failure()}) {
      if (config.tp_size > 1) {
        EXPECT_NE(status.message().find("rank "), std::string::npos) << status.to_string();
      }
      EXPECT_NE(status.message().find("'model.norm.weight'"), std::string::npos) << status.to_string();
    }
    EXPECT_EQ(engine->expert_load().failure, engine->failure().message());
    EXPECT_FALSE(engine->update_weights({folder_.file("a")}, false).ok());
    EXPECT_FALSE(engine->submit({.input_ids = {3}}, [](const Delta&) {}).ok());
    EXPECT_EQ(engine->weight_source().model_path, folder_.file("a"));
  }

  // A checkpoint with the same damage before the update is refused by every rank.
  void check_refusal(const EngineConfig& config) {
    const auto engine = make_engine(config);
    ASSERT_NE(engine, nullptr);
    const std::vector<Output> before = outputs_of(*engine);
    damage(folder_.file("b"));
    const Status refused = engine->update_weights({folder_.file("b")}, false).status();
    EXPECT_EQ(refused.code(), StatusCode::kDataLoss);
    EXPECT_NE(refused.message().find("'model.norm.weight'"), std::string::npos) << refused.to_string();
    EXPECT_TRUE(is_ok(engine->failure()));
    EXPECT_EQ(outputs_of(*engine), before);
    EXPECT_TRUE(is_ok(engine->update_weights({folder_.file("a")}, false).status()));
    EXPECT_EQ(outputs_of(*engine), before);
  }

  TempFolder folder_;
};

}  // namespace fp4moe
