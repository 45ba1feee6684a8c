// The trained draft models of the demo checkpoints: the prompts of reference_acceptance.json, greedy and
// drawn, with and without drafts. Sources that include this header need the definition FP4MOE_MODELS.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "engine/speculative_crowd.h"

namespace fp4moe {

struct TrainedDraft {
  const char* model;
  const char* algorithm;
  const char* draft;  // folder; empty: the model's own layer
};
inline constexpr TrainedDraft kTrainedDrafts[] = {
    {"demo-dsv3-nvfp4", "EAGLE", ""},
    {"demo-gptoss-mxfp4", "EAGLE3", "demo-gptoss-eagle3"},
};
inline std::string trained_name(const testing::TestParamInfo<TrainedDraft>& which) {
  return which.param.algorithm;
}

inline EngineConfig with_trained_drafts(EngineConfig config, const TrainedDraft& drafter) {
  config.speculative_algorithm = drafter.algorithm;
  config.speculative_num_steps = 3;
  if (drafter.draft[0] != '\0')
    config.speculative_draft_model_path = std::string(FP4MOE_MODELS "/") + drafter.draft;
  return config;
}

// The reference's prompts: the numbers of each list named "prompt_ids".
inline std::vector<std::vector<int32_t>> example_prompts(const TrainedDraft& drafter) {
  const std::string folder = drafter.draft[0] != '\0' ? drafter.draft : drafter.model;
  std::ifstream file(FP4MOE_MODELS "/" + folder + "/reference_acceptance.json");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::vector<std::vector<int32_t>> prompts;
  const std::string key = "\"prompt_ids\": [";
  for (size_t at = text.find(key); at != std::string::npos; at = text.find(key, at + 1)) {
    std::vector<int32_t>& ids = prompts.emplace_back();
    const char* next = text.c_str() + at + key.size();
    for (char* end = nullptr; *next != '\0' && *next != ']'; next = *end == ',' ? end + 1 : end)
      ids.push_back(static_cast<int32_t>(std::strtol(next, &end, 10)));
  }
  return prompts;
}

// Runs all examples together, each with all temperatures.
inline Crowd run_examples(const EngineConfig& config, const TrainedDraft& drafter,
                          const std::vector<float>& temperatures = {0.0f, 0.7f}, int top_logprobs = 1) {
  Crowd run;
  const auto engine = make_engine(config);
  if (engine == nullptr) return run;
  std::vector<std::future<Output>> crowd;
  {
    const Hold hold(*engine);
    for (const float temperature : temperatures)
      for (const std::vector<int32_t>& ids : example_prompts(drafter)) {
        Request request{.input_ids = ids};
        request.sampling = {.temperature = temperature,
                            .seed = crowd.size(),
                            .max_new_tokens = 64,
                            .top_logprobs = top_logprobs};
        crowd.push_back(submit(*engine, std::move(request)));
      }
  }
  for (auto& output : crowd) run.outputs.push_back(output.get());
  engine->drain(60);
  run.stats = engine->stats();
  return run;
}

// The trained models guess at least one more token a step; the outputs are those of plain decoding.
inline void expect_trained_drafts(const EngineConfig& config, const TrainedDraft& drafter,
                                  const std::string& what) {
  const Crowd plain = run_examples(config, drafter);
  const Crowd drafted = run_examples(with_trained_drafts(config, drafter), drafter);
  ASSERT_EQ(plain.outputs.size(), 16u);
  EXPECT_EQ(drafted.outputs, plain.outputs) << what;
  const double length = drafted.stats.spec_accept_length();
  std::printf("%s: acceptance length %.3f with 3 drafts\n", what.c_str(), length);
  EXPECT_GE(length, 2.0) << what;
}

}  // namespace fp4moe
