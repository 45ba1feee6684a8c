// The MTP layer and the features that it continues, against transformers' MtpModel and generate(use_mtp=True)
// (make_mtp_fixtures.py): bf16 experts with latent attention, FP4 experts with grouped-query attention. For
// models with states, which transformers drafts with no MTP layer: against its parts made from stock modules.
#include "model/mtp_head.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "io/changed_checkpoint.h"
#include "model/draft_models.h"
#include "model/plan_model.h"
#include "model/weight_loader.h"
#include "rank_threads.h"
#include "reference_prompt.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr double kFloat32Limit = 1e-4;
constexpr int64_t kPageSize = 4;

EngineConfig reference_flags() {
  EngineConfig flags;
  flags.dtype = "float32";
  flags.moe_runner_backend = "ref";
  return flags;
}

// Relative L2 errors of rows of `cols`, ascending.
std::vector<double> row_errors(const std::vector<float>& actual, const std::vector<float>& expected,
                               size_t cols) {
  std::vector<double> errors;
  for (size_t at = 0; at < expected.size(); at += cols)
    errors.push_back(relative_l2(std::span(actual).subspan(at, cols), std::span(expected).subspan(at, cols)));
  std::sort(errors.begin(), errors.end());
  return errors;
}

int32_t best(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

class Mtp : public testing::TestWithParam<const char*> {
 protected:
  std::string folder() const { return std::string(FP4MOE_FIXTURES "/") + GetParam(); }
  std::vector<float> floats(const std::string& name) const {
    return read_reference(folder() + "/expected.safetensors", "ids", name).value().logits;
  }
  std::vector<int32_t> ids(const std::string& name) const {
    return read_reference(folder() + "/expected.safetensors", name, "hidden").value().ids;
  }
  size_t vocab_size() const { return static_cast<size_t>(load_model_config(folder()).value().vocab_size); }

  std::vector<float> draft_logits(const EngineConfig& flags, const std::vector<int32_t>& prompt,
                                  int64_t chunk = 64, int64_t num_chained = 1) const {
    RankRun run{folder(), flags, chunk, kPageSize};
    run.num_chained = num_chained;
    const auto groups = run_ranks(run, {prompt});
    EXPECT_TRUE(groups.ok()) << groups.status().to_string();
    return groups.ok() ? groups->front() : std::vector<float>{};
  }
  // The rows of mtp_logits, then those of chain_logits.
  std::vector<float> expected_logits() const {
    std::vector<float> all = floats("mtp_logits");
    const std::vector<float> chained = floats("chain_logits");
    all.insert(all.end(), chained.begin(), chained.end());
    return all;
  }
};

TEST_P(Mtp, ReferenceRunnerMatchesTheStockClass) {
  const std::vector<float> expected = expected_logits();
  for (const int tp : {1, 2}) {
    EngineConfig flags = reference_flags();
    flags.tp_size = flags.ep_size = tp;
    const std::vector<float> logits = draft_logits(flags, ids("ids"), 64, 3);
    ASSERT_EQ(logits.size(), expected.size()) << "tp " << tp;
    EXPECT_LE(row_errors(logits, expected, vocab_size()).back(), kFloat32Limit) << "tp " << tp;
  }
}

// Random weights amplify the rounding of activations to bf16 more than trained ones.
TEST_P(Mtp, DefaultRunnerIsNearTheStockClass) {
  const std::vector<float> expected = expected_logits();
  for (const int tp : {1, 2}) {
    EngineConfig flags;
    flags.tp_size = flags.ep_size = tp;
    const std::vector<float> logits = draft_logits(flags, ids("ids"), 64, 3);
    ASSERT_EQ(logits.size(), expected.size()) << "tp " << tp;
    const std::vector<double> errors = row_errors(logits, expected, vocab_size());
    EXPECT_LE(errors[errors.size() / 2], 2e-2) << "tp " << tp;
    EXPECT_GE(errors.back(), 1e-6) << "bf16 activations cannot be this close";
  }
}

// The drafts that generate(use_mtp=True) made step by step are those of one pass over the whole text.
TEST_P(Mtp, DraftsAreThoseOfGenerate) {
  std::vector<int32_t> text = ids("ids");
  text.pop_back();
  const std::vector<int32_t> generated = ids("generated"), drafts = ids("drafts");
  text.insert(text.end(), generated.begin(), generated.end());
  const std::vector<float> logits = draft_logits(reference_flags(), text);
  const size_t v = vocab_size();
  ASSERT_GE(drafts.size(), 16u);
  for (size_t i = 0; i < drafts.size(); i += 2) {
    const size_t row = static_cast<size_t>(drafts[i]) - 2;  // takes the token before the draft
    EXPECT_EQ(best(std::span(logits).subspan(row * v, v)), drafts[i + 1]) << "position " << drafts[i];
  }
}

TEST_P(Mtp, ChunksAndThreadsOfRanksChangeNoBit) {
  const std::vector<int32_t> prompt = ids("ids");
  const std::vector<float> whole = draft_logits({}, prompt, 64, 3);
  for (const int64_t chunk : {1, 5}) EXPECT_EQ(draft_logits({}, prompt, chunk, 3), whole) << chunk;
  for (const char* a2a : {"none", "deepep", "flashinfer"}) {
    EngineConfig flags;
    flags.enable_deterministic_inference = true;
    flags.moe_a2a_backend = a2a;
    flags.a2a_memory_budget = 1 << 20;
    const std::vector<float> one = draft_logits(flags, prompt, 5, 3);
    flags.tp_size = flags.ep_size = 2;
    EXPECT_EQ(draft_logits(flags, prompt, 5, 3), one) << a2a;
  }
}

// The second group's prompt ends early, or has no rows at all.
TEST_P(Mtp, DataParallelGroupsAgreeWithOneRank) {
  const std::vector<int32_t> first = ids("ids");
  for (const char* a2a : {"none", "deepep", "flashinfer"})
    for (const size_t length : {first.size() - 1, size_t{1}}) {
      EngineConfig flags;
      flags.dtype = "float32";
      flags.moe_a2a_backend = a2a;
      flags.a2a_memory_budget = 1 << 20;
      const std::vector<std::vector<int32_t>> prompts = {first, {first.begin(), first.begin() + length}};
      const std::vector<std::vector<float>> one = {draft_logits(flags, prompts[0], 5, 2),
                                                   draft_logits(flags, prompts[1], 5, 2)};
      flags.tp_size = flags.ep_size = flags.dp_size = 2;
      flags.enable_dp_attention = true;
      RankRun run{folder(), flags, (std::ssize(first) + 1) / 2, kPageSize};  // both end in the last step
      run.num_chained = 2;
      const auto groups = run_ranks(run, prompts);
      ASSERT_TRUE(groups.ok()) << groups.status().to_string();
      EXPECT_EQ(one[1].empty(), length == 1);
      for (size_t g = 0; g < 2; ++g) EXPECT_TRUE(within_relative_l2((*groups)[g], one[g], 1e-5)) << a2a;
    }
}

// A target's logits, experts and features for the fixture's prompt.
struct TargetRun {
  std::vector<float> logits, features;
  std::vector<int32_t> experts;
  int64_t width = 0;
};

class TargetFeatures : public Mtp {
 protected:
  // Computes logits of every third row.
  TargetRun run(const EngineConfig& flags, const FeatureOptions& features) const {
    const ModelConfig config = load_model_config(folder()).value();
    const ModelPlan plan = plan_model(config, flags).value();
    const Checkpoint checkpoint = Checkpoint::open(folder()).value();
    ThreadPool pool(2);
    std::vector<int32_t> tokens = ids("ids");
    tokens.pop_back();
    const int64_t t = std::ssize(tokens);
    const ModelOptions options{.act_dtype = plan.act_dtype,
                               .isa = plan.isa,
                               .moe_plan = plan.moe,
                               .max_batch_tokens = t,
                               .features = features};
    const auto model = Model::load(checkpoint, config, options, pool, {}).value();
    KvCache kv = KvCache::make(config, plan.act_dtype, {.full = 2}, 16).value();
    std::vector<int64_t> positions(tokens.size()), logit_rows;
    std::iota(positions.begin(), positions.end(), 0);
    for (int64_t row = 0; row < t; row += 3) logit_rows.push_back(row);
    const std::vector<int32_t> pages = {1, 0};
    const SequenceRows sequence{0, t, 0, pages};
    TargetRun out;
    out.logits.resize(logit_rows.size() * static_cast<size_t>(config.vocab_size));
    out.experts.assign(static_cast<size_t>(config.num_layers * t * config.top_k), -1);
    const Batch batch{tokens, positions, {&sequence, 1}, logit_rows, out.experts.data()};
    const Status status = model->forward_model(batch, kv, out.logits.data(), pool);
    EXPECT_TRUE(status.ok()) << status.to_string();
    const Features kept = model->features();
    const auto* values = static_cast<const float*>(kept.data);
    if (values != nullptr) out.features.assign(values, values + kept.num_rows * kept.width);
    out.width = kept.width;
    return out;
  }
};

TEST_P(TargetFeatures, MatchTheStockClass) {
  const ModelConfig config = load_model_config(folder()).value();
  const auto h = static_cast<size_t>(config.hidden_size);
  const std::vector<float> hidden = floats("hidden"), residual = floats("residual");
  const TargetRun out = run(reference_flags(), {.is_final_norm = true, .after_layers = {1, 0}});
  ASSERT_EQ(out.width, 3 * config.hidden_size);
  const Checkpoint checkpoint = Checkpoint::open(folder()).value();
  const auto* weight = checkpoint.find("model.norm.weight")->view.as<bf16>();
  for (size_t row = 0; row * h < hidden.size(); ++row) {
    const std::span<const float> kept(out.features.data() + row * 3 * h, 3 * h), last = kept.first(h);
    EXPECT_TRUE(within_relative_l2(kept.subspan(h, h), std::span(residual).subspan(row * h, h), 1e-5));
    EXPECT_TRUE(within_relative_l2(kept.subspan(2 * h), std::span(hidden).subspan(row * h, h), 1e-5));
    const double squares = std::inner_product(last.begin(), last.end(), last.begin(), 0.0);
    const double factor = 1 / std::sqrt(squares / static_cast<double>(h) + config.rms_norm_eps);
    std::vector<float> normed;
    for (size_t i = 0; i < h; ++i)
      normed.push_back(static_cast<float>(last[i] * factor * bf16_to_float(weight[i])));
    EXPECT_TRUE(within_relative_l2(normed, kept.subspan(2 * h), 1e-5)) << "row " << row;
  }
}

TEST_P(TargetFeatures, ChangeNoBitOfLogitsAndExperts) {
  for (const EngineConfig& flags : {EngineConfig{}, reference_flags()}) {
    const TargetRun plain = run(flags, {});
    EXPECT_TRUE(plain.features.empty());
    for (const FeatureOptions& features :
         {FeatureOptions{true, {}}, FeatureOptions{false, {0}}, FeatureOptions{false, {0, 1}}}) {
      const TargetRun kept = run(flags, features);
      EXPECT_EQ(kept.logits, plain.logits);
      EXPECT_EQ(kept.experts, plain.experts);
      EXPECT_FALSE(kept.features.empty());
    }
  }
}

TEST_P(TargetFeatures, OfALayerThatDoesNotExistAreRefused) {
  const ModelConfig config = load_model_config(folder()).value();
  const ModelPlan plan = plan_model(config, {}).value();
  ThreadPool pool(1);
  const ModelOptions options{.moe_plan = plan.moe, .max_batch_tokens = 1, .features = {false, {0, 2}}};
  const auto model = Model::load(Checkpoint::open(folder()).value(), config, options, pool, {});
  ASSERT_FALSE(model.ok());
  EXPECT_NE(model.status().message().find("after layer 2; legal: layers 0 to 1"), std::string::npos)
      << model.status().to_string();
}

TEST_P(Mtp, ACheckpointWithoutTheLayerIsRefused) {
  const ModelConfig config = load_model_config(folder()).value();
  const Checkpoint checkpoint = Checkpoint::open(folder()).value();
  EXPECT_TRUE(check_mtp_layer(checkpoint, config).ok());
  const auto refusal = [&](const Checkpoint& source, int64_t declared) {
    ModelConfig changed = config;
    changed.num_mtp_layers = declared;
    changed.may_have_mtp_layer = false;
    const Status status = check_mtp_layer(source, changed);
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    return status.message();
  };
  const bool is_below_mtp = config.mtp_layer >= 0;
  const std::string key = is_below_mtp ? "mtp_num_hidden_layers" : "num_nextn_predict_layers";
  EXPECT_NE(refusal(checkpoint, 0).find(key + " = 0"), std::string::npos);
  EXPECT_NE(refusal(checkpoint, 2).find(key + " = 2"), std::string::npos);
  ChangedCheckpoint changed(checkpoint);
  changed.remove("model.layers.2.eh_proj.weight");
  EXPECT_NE(
      refusal(changed.make(), 1).find(is_below_mtp ? "'mtp.fc.weight'" : "'model.layers.2.eh_proj.weight'"),
      std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(Fixtures, Mtp,
                         testing::Values("dsv3_h32_mtp_bf16", "glm4_h32_mtp_fp4", "qwen3_5_h32_mtp_fused",
                                         "qwen3_next_h32_mtp_fp4"));
INSTANTIATE_TEST_SUITE_P(Fixtures, TargetFeatures, testing::Values("dsv3_h32_mtp_bf16", "glm4_h32_mtp_fp4"));

}  // namespace
}  // namespace fp4moe
