// Engines on random models with states: the outputs of a crowd that reuses prefixes, is retracted, aborted
// and spread over ranks are those of requests that run alone.
#include <gtest/gtest.h>

#include "engine/ranks/growing_drafts.h"
#include "engine/speculative_crowd.h"
#include "io/small_model.h"
#include "io/status_matchers.h"
#include "io/temp_folder.h"

namespace fp4moe {
namespace {

class StateEngine : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    MakeTinyOptions options = small_model(GetParam());
    options.vocab_size = 259;  // every id has a token
    ASSERT_TRUE(is_ok(make_tiny(folder_.path(), options)));
    config_.model_path = folder_.path();
    config_.device = "cpu";
    config_.threads = 2;
    config_.page_size = 8;
    config_.context_length = 512;
    config_.max_total_tokens = 16384;
    config_.chunked_prefill_size = 48;
    config_.mamba_track_interval = 32;
  }

  static Crowd run_alone(EngineConfig config) {
    config.max_running_requests = 1;
    config.disable_radix_cache = true;
    config.chunked_prefill_size = 512;
    return run_crowd(config);
  }

  static void expect_same(const Crowd& crowd, const Crowd& alone, const std::string& what) {
    ASSERT_EQ(alone.outputs.size(), 32u);
    ASSERT_EQ(crowd.outputs.size(), 32u);
    for (size_t i = 0; i < alone.outputs.size(); ++i)
      EXPECT_EQ(crowd.outputs[i], alone.outputs[i]) << "request " << i << ", " << what;
    EXPECT_EQ(crowd.stats.num_used_state_slots, 0) << what;
    EXPECT_LE(crowd.stats.num_state_snapshots, crowd.stats.num_state_slots) << what;
  }

  TempFolder folder_;
  EngineConfig config_;
};

TEST_P(StateEngine, ACrowdHasTheOutputsOfRequestsThatRunAlone) {
  const Crowd alone = run_alone(config_);
  EXPECT_EQ(alone.stats.cached_tokens_total, 0);
  EXPECT_EQ(alone.stats.num_state_snapshots, 0);
  const Crowd crowd = run_crowd(config_);
  expect_same(crowd, alone, "prefix reuse");
  EXPECT_GT(crowd.stats.cached_tokens_total, 0);
  EXPECT_GT(crowd.stats.num_state_snapshots, 0);

  EngineConfig config = config_;
  config.max_total_tokens = 640;
  config.schedule_conservativeness = 0;
  const Crowd retracted = run_crowd(config);
  expect_same(retracted, alone, "retraction");
  EXPECT_GT(retracted.stats.num_retracted_reqs, 0);

  config = config_;
  config.max_running_requests = 8;
  config.max_mamba_cache_size = 9;  // room for one snapshot
  expect_same(run_crowd(config), alone, "one snapshot");
}

TEST_P(StateEngine, RanksHaveTheOutputsOfOneRank) {
  EngineConfig config = config_;
  config.moe_a2a_backend = "none";
  config.enable_deterministic_inference = true;
  const Crowd alone = run_alone(config);
  for (const int ranks : {2, 4}) {
    config.tp_size = ranks;
    config.dp_size = ranks / 2;
    config.enable_dp_attention = config.dp_size > 1;
    expect_same(run_crowd(config), alone, std::to_string(ranks) + " ranks");
  }
}

TEST_P(StateEngine, DraftsChangeNoOutput) {
  const Crowd alone = run_alone(config_);
  const auto whole = whole_texts(config_, alone);
  for (const DraftKind kind : {DraftKind::kWrong, DraftKind::kMixed, DraftKind::kRight}) {
    const std::string what = "drafts " + std::to_string(static_cast<int>(kind));
    EngineConfig config = with_ngrams(config_);
    config.draft_source = drafts_of_kind(whole, kind);
    const Crowd crowd = run_crowd(config);
    expect_same(crowd, alone, what);
    EXPECT_GT(crowd.stats.cached_tokens_total, 0);
    EXPECT_GT(crowd.stats.num_state_snapshots, 0);
    const double length = crowd.stats.spec_accept_length();
    if (kind == DraftKind::kWrong) {
      EXPECT_LT(length, 1.1);
    }
    if (kind == DraftKind::kMixed) {
      EXPECT_GT(length, 1.5);
      EXPECT_LT(length, 4.5);
    }
    if (kind == DraftKind::kRight) {
      EXPECT_GT(length, 4) << "of at most 6 tokens a step";
    }

    config.max_total_tokens = 640;
    config.schedule_conservativeness = 0;
    const Crowd retracted = run_crowd(config);
    expect_same(retracted, alone, "retraction, " + what);
    EXPECT_GT(retracted.stats.num_retracted_reqs, 0);

    config.max_total_tokens = config_.max_total_tokens;
    config.max_running_requests = 8;
    config.max_mamba_cache_size = 9;  // room for one snapshot
    config.speculative_num_draft_tokens = 17;
    expect_same(run_crowd(config), alone, "one snapshot, " + what);
  }
}

// Continues each text by a few tokens.
std::vector<Output> run_turns(Engine& engine, const std::vector<std::vector<int32_t>>& whole) {
  std::vector<std::future<Output>> turns;
  for (const std::vector<int32_t>& text : whole) {
    Request request;
    request.input_ids = text;
    for (const int32_t id : {5, 6, 7}) request.input_ids.push_back(id);
    request.sampling = {.temperature = 0, .max_new_tokens = 12, .ignore_eos = true, .top_logprobs = 3};
    turns.push_back(submit(engine, std::move(request)));
  }
  std::vector<Output> outputs;
  for (auto& turn : turns) outputs.push_back(turn.get());
  return outputs;
}

// A snapshot in an output, every page or only where the output ends, has the state of the tokens before it,
// without drafts that the next step would have replayed.
TEST_P(StateEngine, TurnsContinueFromSnapshotsInDraftedOutputs) {
  const Crowd alone = run_alone(config_);
  const auto whole = whole_texts(config_, alone);
  EngineConfig config = config_;
  config.disable_radix_cache = true;
  const auto plain = make_engine(config);
  ASSERT_NE(plain, nullptr);
  const std::vector<Output> expected = run_turns(*plain, whole);
  for (const DraftKind kind : {DraftKind::kMixed, DraftKind::kRight})
    for (const int interval : {8, 256}) {
      config = with_ngrams(config_);
      config.draft_source = drafts_of_kind(whole, kind);
      config.mamba_track_interval = interval;
      config.max_mamba_cache_size = 1000;
      const auto engine = make_engine(config);
      ASSERT_NE(engine, nullptr);
      std::vector<std::future<Output>> first;
      int64_t num_prompt_tokens = 0;
      for (Request& request : requests(*engine)) {
        num_prompt_tokens += std::ssize(request.input_ids);
        first.push_back(submit(*engine, std::move(request)));
      }
      for (size_t i = 0; i < first.size(); ++i) EXPECT_EQ(first[i].get(), alone.outputs[i]) << i;
      const int64_t num_cached = engine->stats().cached_tokens_total;
      EXPECT_EQ(run_turns(*engine, whole), expected) << interval;
      engine->drain(60);
      EXPECT_GT(engine->stats().spec_correct_drafts_total, 500);
      // More than if the turns had found whole prompts and no part of an output.
      if (interval == 8) {
        EXPECT_GT(engine->stats().cached_tokens_total - num_cached, num_prompt_tokens);
      }
    }
}

TEST_P(StateEngine, RanksWithDraftsHaveTheOutputsOfOneRank) {
  for (const bool exchanges : {false, true}) {
    EngineConfig config = config_;
    config.moe_a2a_backend = exchanges ? "deepep" : "none";
    config.enable_deterministic_inference = true;
    const Crowd alone = run_alone(config);
    config = with_ngrams(config);
    config.draft_source = drafts_of_kind(whole_texts(config_, alone), DraftKind::kMixed);
    config.tp_size = 2;
    config.ep_size = exchanges ? 2 : 1;
    for (const int dp : {1, 2}) {
      config.dp_size = dp;
      config.enable_dp_attention = dp > 1;
      const Crowd crowd = run_crowd(config);
      expect_same(crowd, alone, std::to_string(dp) + " groups" + (exchanges ? ", deepep" : ""));
      EXPECT_GT(crowd.stats.spec_correct_drafts_total, 100);
    }
  }
}

TEST_P(StateEngine, NgramsAndADraftModelChangeNoOutput) {
  const Crowd alone = run_alone(config_);
  const Crowd ngrams = run_crowd(with_ngrams(config_));
  expect_same(ngrams, alone, "n-grams");
  EXPECT_GT(ngrams.stats.spec_proposed_drafts_total, 0);

  EngineConfig config = config_;
  config.speculative_algorithm = "STANDALONE";
  config.speculative_num_draft_tokens = 4;
  TempFolder draft;
  MakeTinyOptions options = small_model("qwen3-moe-tiny");
  options.vocab_size = 259;
  ASSERT_TRUE(is_ok(make_tiny(draft.path(), options)));
  config.speculative_draft_model_path = draft.path();
  const Crowd drafted = run_crowd(config);
  expect_same(drafted, alone, "a draft model");
  EXPECT_GT(drafted.stats.spec_proposed_drafts_total, 1000);

  config.speculative_draft_model_path = folder_.path();
  const Result<std::unique_ptr<Engine>> refused = Engine::make(config);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("a draft model with recurrent layers"), std::string::npos)
      << refused.status().message();
}

TEST_P(StateEngine, TooManyDraftsAreRefused) {
  EngineConfig config = with_ngrams(config_);
  config.speculative_num_draft_tokens = 18;
  const Result<std::unique_ptr<Engine>> engine = Engine::make(config);
  ASSERT_FALSE(engine.ok());
  EXPECT_NE(engine.status().message().find("--speculative-num-draft-tokens 17"), std::string::npos)
      << engine.status().message();
}

TEST_P(StateEngine, AbortedRequestsLeaveTheOthersAsTheyAre) {
  const Crowd alone = run_alone(config_);
  config_ = with_ngrams(config_);
  config_.draft_source = drafts_of_kind(whole_texts(config_, alone), DraftKind::kMixed);
  const auto engine = make_engine(config_);
  ASSERT_NE(engine, nullptr);
  std::vector<std::future<Output>> outputs;
  std::vector<std::string> aborted;
  std::vector<Request> list = requests(*engine);
  {
    const Hold hold(*engine);
    for (Request& request : list) {
      Request copy = request;  // shares the other's prefix, and may be the one that computes it
      copy.sampling.max_new_tokens = 400;
      const auto id = engine->submit(std::move(copy), [](const Delta&) {});
      ASSERT_TRUE(is_ok(id));
      aborted.push_back(*id);
      outputs.push_back(submit(*engine, std::move(request)));
    }
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    engine->cancel(aborted[(i * 7) % aborted.size()]);
    EXPECT_EQ(outputs[i].get(), alone.outputs[i]) << "request " << i;
  }
  engine->drain(60);
  EXPECT_EQ(engine->stats().num_used_state_slots, 0);
  EXPECT_EQ(engine->stats().num_leaked_pages, 0);
}

// Step by step, with the ranks of a demo checkpoint; gpu_state_test does the same on a GPU.
TEST(StateRanks, DraftsChangeNoBit) {
  EngineConfig flags;
  flags.device = "cpu";
  flags.threads = 2;
  expect_states_without_drafts("demo-qwen35-nvfp4", flags, "CPU");
}

INSTANTIATE_TEST_SUITE_P(Models, StateEngine, testing::Values("qwen3-next-tiny", "qwen3.5-moe-tiny"),
                         [](const auto& test) { return test.index == 0 ? "qwen3_next" : "qwen3_5_moe"; });

}  // namespace
}  // namespace fp4moe
