// Requests that leave data-parallel groups idle, or with few rows, while others draft. Sources that include
// this header need the definition FP4MOE_MODELS.
#pragma once

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/trained_drafts.h"

namespace fp4moe {

// A request that is cancelled after its first tokens.
struct Cancelled {
  std::string id;
  std::future<void> starts, ends;
};

inline Cancelled submit_to_cancel(Engine& engine, Request request) {
  struct State {
    std::promise<void> starts, ends;
    bool has_started = false;
  };
  const auto state = std::make_shared<State>();
  Cancelled cancelled{{}, state->starts.get_future(), state->ends.get_future()};
  const auto id = engine.submit(std::move(request), [state](const Delta& delta) {
    EXPECT_NE(delta.finish_reason, FinishReason::kError) << delta.error;
    if (!std::exchange(state->has_started, true)) state->starts.set_value();
    if (delta.finish_reason != FinishReason::kNone) state->ends.set_value();
  });
  EXPECT_TRUE(id.ok()) << id.status().to_string();
  cancelled.id = id.ok() ? *id : "";
  return cancelled;
}

// One request alone, then requests of very different lengths, some of them cancelled, then one alone.
inline Crowd run_uneven(const EngineConfig& config, const TrainedDraft& drafter) {
  Crowd run;
  const auto engine = make_engine(config);
  if (engine == nullptr) return run;
  const std::vector<std::vector<int32_t>> prompts = example_prompts(drafter);
  EXPECT_EQ(prompts.size(), 8u);
  const auto request = [&](size_t i, int64_t num_tokens) {
    Request made{.input_ids = prompts[i % prompts.size()]};
    made.sampling = {.temperature = i % 2 == 0 ? 0.0f : 0.7f,
                     .seed = i,
                     .max_new_tokens = num_tokens,
                     .ignore_eos = true,
                     .top_logprobs = 1};
    if (i == 5) made.sampling.frequency_penalty = 0.5f;  // the host takes its drafts before the step
    return made;
  };
  run.outputs.push_back(submit(*engine, request(0, 40)).get());
  std::vector<std::future<Output>> crowd;
  std::vector<Cancelled> cancelled;
  {
    const Hold hold(*engine);
    size_t i = 1;
    for (const int64_t num_tokens : {90, 1, 60, 2, 30, 5, 1, 75, 9}) {
      crowd.push_back(submit(*engine, request(i++, num_tokens)));
      if (i % 3 == 0) cancelled.push_back(submit_to_cancel(*engine, request(i, 200)));
    }
  }
  for (Cancelled& one : cancelled) {
    one.starts.wait();
    engine->cancel(one.id);
    one.ends.wait();
  }
  for (auto& output : crowd) run.outputs.push_back(output.get());
  run.outputs.push_back(submit(*engine, request(1, 40)).get());
  engine->drain(60);
  run.stats = engine->stats();
  EXPECT_EQ(run.stats.num_used_tokens, 0);
  EXPECT_EQ(run.stats.num_leaked_pages, 0);
  return run;
}

// Drafts on data-parallel groups have the outputs of one rank without drafts.
inline void expect_uneven_outputs(const EngineConfig& groups, const EngineConfig& one,
                                  const TrainedDraft& drafter) {
  const std::string what = std::string(drafter.algorithm) + ", tp " + std::to_string(groups.tp_size) +
                           ", dp " + std::to_string(groups.dp_size) + ", a2a " + groups.moe_a2a_backend;
  const Crowd plain = run_uneven(one, drafter);
  const Crowd drafted = run_uneven(with_trained_drafts(groups, drafter), drafter);
  ASSERT_EQ(plain.outputs.size(), 11u);
  ASSERT_EQ(drafted.outputs.size(), 11u);
  for (size_t i = 0; i < plain.outputs.size(); ++i)
    EXPECT_TRUE(drafted.outputs[i] == plain.outputs[i])
        << "request " << i << ", " << what << ": " << drafted.outputs[i].text << ", not "
        << plain.outputs[i].text;
  EXPECT_EQ(plain.stats.spec_verify_calls_total, 0);
  EXPECT_GT(drafted.stats.spec_correct_drafts_total, 20) << what;
}

}  // namespace fp4moe
