// EAGLE-3 heads on a small target against the oracle: every variant of config.json and of the tensors.
#include "model/eagle3_head.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "eagle3_oracle.h"
#include "io/changed_checkpoint.h"
#include "io/checkpoint/eagle3_tensors.h"
#include "io/small_model.h"
#include "io/status_matchers.h"
#include "io/temp_folder.h"
#include "io/write/make_tiny_eagle3.h"
#include "model/draft_models.h"
#include "model/plan_model.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr double kFloat32Limit = 1e-4, kDefaultLimit = 3e-2;
constexpr int kPageSize = 4;
constexpr int64_t kPagesPerSequence = 75, kMaxRows = 300;

struct Variant {
  const char* name;
  const char* changes;  // of config.json
  bool has_embedding = false, has_lm_head = false;
};

const Variant kVariants[] = {
    {"default", "{}"},
    {"fc_norm", R"({"fc_norm": true})"},
    {"norm_before_fc", R"({"eagle_config": {"norm_before_fc": true}})"},
    {"norm_before_residual", R"({"norm_before_residual": true})"},
    {"norm_output", R"({"norm_output": true})"},
    {"all_norms", R"({"fc_norm": true, "norm_before_residual": true, "norm_output": true})"},
    {"four_features", R"({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}})"},
    {"shared_lm_head", R"({"draft_vocab_size": null})"},
    {"own_embedding_and_lm_head", R"({"draft_vocab_size": null})", true, true},
    {"two_layers", R"({"num_hidden_layers": 2})"},
    {"three_layers_norm_output", R"({"num_hidden_layers": 3, "norm_output": true})"},
    {"narrow", R"({"hidden_size": 32, "target_hidden_size": 64, "head_dim": 10, "num_attention_heads": 6,
                   "num_key_value_heads": 3, "intermediate_size": 52, "rope_theta": 500.0})"},
    {"final_norm", R"({"eagle_config": {"use_aux_hidden_state": false,
                                        "eagle_aux_hidden_state_layer_ids": []}})"},
    {"final_norm_narrow", R"({"hidden_size": 32, "target_hidden_size": 64,
        "eagle_config": {"use_aux_hidden_state": false, "eagle_aux_hidden_state_layer_ids": []}})"},
};

// Sizes of the target that the oracle needs.
struct Target {
  TempFolder folder;
  ModelConfig config;
  std::unique_ptr<Checkpoint> checkpoint;

  Target() {
    MakeTinyOptions options = small_model("gpt-oss-tiny");
    options.num_hidden_layers = 4;
    options.hidden_size = 64;
    EXPECT_TRUE(is_ok(make_tiny(folder.path(), options)));
    config = load_model_config(folder.path()).value();
    checkpoint = std::make_unique<Checkpoint>(Checkpoint::open(folder.path()).value());
  }
};

Target& target() {
  static Target one;
  return one;
}

OracleRow doubles_of(const TensorView& view) {
  OracleRow values(static_cast<size_t>(view.num_elems()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = bf16_to_float(view.as<bf16>()[i]);
  return values;
}

// The head for the oracle, from the files and from the variant's text, not through Eagle3Config.
OracleHead oracle_of(const Variant& variant, const Checkpoint& checkpoint) {
  const std::string text = variant.changes;
  const auto has = [&text](const char* part) { return text.find(part) != text.npos; };
  OracleHead head;
  head.hidden = has("\"hidden_size\": 32") ? 32 : 64;
  head.target_hidden = 64;
  head.heads = has("\"num_attention_heads\": 6") ? 6 : target().config.num_heads;
  head.kv_heads = has("\"num_key_value_heads\": 3") ? 3 : target().config.num_kv_heads;
  head.head_dim = has("\"head_dim\": 10") ? 10 : target().config.head_dim;
  head.layers = has("\"num_hidden_layers\": 2") ? 2 : has("\"num_hidden_layers\": 3") ? 3 : 1;
  head.theta = has("500.0") ? 500 : 10000;
  head.norm_before_fc = has("norm_before_fc");
  head.fc_norm = has("fc_norm");
  head.norm_before_residual = has("norm_before_residual");
  head.norm_output = has("norm_output");
  for (const Checkpoint* from : {&checkpoint, static_cast<const Checkpoint*>(target().checkpoint.get())})
    for (const TensorEntry& tensor : from->tensors()) {
      const bool is_shared = tensor.name == "model.embed_tokens.weight" || tensor.name == "lm_head.weight";
      if (tensor.view.dtype != DType::kBF16 || (from != &checkpoint && !is_shared)) continue;
      const std::string name = is_shared && tensor.name[0] == 'm' ? "embed_tokens.weight" : tensor.name;
      if (!head.tensors.contains(name)) head.tensors[name] = doubles_of(tensor.view);
    }
  return head;
}

struct Mode {
  const char* dtype;
  double limit;
};
const Mode kFloat32 = {"float32", kFloat32Limit}, kDefault = {"auto", kDefaultLimit};

// A batch of some rows of each of two sequences, from `first[s]` on.
struct Rows {
  std::vector<int32_t> ids, pages;
  std::vector<int64_t> positions, logit_rows, feature_rows;
  std::vector<SequenceRows> sequences;

  Rows() = default;
  Rows(const std::vector<std::vector<int32_t>>& tokens, const std::vector<int64_t>& first) {
    pages.resize(tokens.size() * kPagesPerSequence);
    std::iota(pages.rbegin(), pages.rend(), 0);
    for (size_t s = 0; s < tokens.size(); ++s) {
      if (tokens[s].empty()) continue;
      sequences.push_back({std::ssize(ids), std::ssize(tokens[s]), first[s],
                           std::span(pages).subspan(s * kPagesPerSequence, kPagesPerSequence)});
      for (size_t i = 0; i < tokens[s].size(); ++i) {
        positions.push_back(first[s] + static_cast<int64_t>(i));
        ids.push_back(tokens[s][i]);
      }
    }
    logit_rows.resize(ids.size());
    std::iota(logit_rows.begin(), logit_rows.end(), 0);
  }
  Batch batch() const {
    return {.token_ids = ids, .positions = positions, .sequences = sequences, .logit_rows = logit_rows};
  }
};

// A loaded target and head with their pages, and the same sequences in the oracle.
class Pair {
 public:
  Pair(const Checkpoint& checkpoint, const Eagle3Config& config, const Mode& mode, OracleHead oracle)
      : oracle_(std::move(oracle)), caches_(2) {
    EngineConfig flags;
    flags.dtype = mode.dtype;
    const ModelPlan plan = plan_model(target().config, flags).value();
    ModelOptions options{.act_dtype = plan.act_dtype,
                         .kv_dtype = plan.kv_dtype,
                         .isa = plan.isa,
                         .moe_plan = plan.moe,
                         .max_batch_tokens = kMaxRows,
                         .features = eagle3_features(config)};
    target_ = Model::load(*target().checkpoint, target().config, options, pool_, {}).value();
    options.features = {};
    auto head = load_eagle3_head(checkpoint, config, options, *target_, pool_, {});
    EXPECT_TRUE(is_ok(head));
    head_ = std::move(*head);
    const KvCounts pages{.full = 2 * kPagesPerSequence};
    target_kv_ = KvCache::make(target().config, plan.kv_dtype, pages, kPageSize).value();
    head_kv_ = KvCache::make(head_->config(), plan.kv_dtype, pages, kPageSize).value();
  }

  const Model& head() const { return *head_; }

  void run_target(const Rows& rows) {
    std::vector<float> logits(rows.ids.size() * static_cast<size_t>(target().config.vocab_size));
    EXPECT_TRUE(is_ok(target_->forward_model(rows.batch(), target_kv_, logits.data(), pool_)));
  }

  // Returns the logits of the logit rows, in the head and in the oracle.
  std::pair<std::vector<float>, std::vector<float>> run_head(const Rows& rows, bool chains) {
    Batch batch = rows.batch();
    batch.model = BatchModel::kDraft;
    batch.feature_rows = rows.feature_rows;
    batch.chains = chains;
    const auto v = static_cast<size_t>(head_->config().vocab_size);
    std::vector<float> logits(rows.logit_rows.size() * v), expected;
    const std::vector<OracleRow> features = features_of(rows, chains);
    EXPECT_TRUE(is_ok(head_->forward_model(batch, head_kv_, logits.data(), pool_)));
    outputs_.clear();
    for (size_t t = 0; t < rows.ids.size(); ++t) {
      const OracleOutput out = run_oracle(oracle_, rows.ids[t], rows.positions[t], features[t], chains,
                                          caches_[sequence_of(rows, t)]);
      outputs_.push_back(out.output);
      if (std::ranges::find(rows.logit_rows, static_cast<int64_t>(t)) != rows.logit_rows.end())
        expected.insert(expected.end(), out.logits.begin(), out.logits.end());
    }
    return {logits, expected};
  }

 private:
  size_t sequence_of(const Rows& rows, size_t row) const {
    for (const SequenceRows& s : rows.sequences)
      if (static_cast<int64_t>(row) >= s.first_row && static_cast<int64_t>(row) < s.first_row + s.num_rows)
        return static_cast<size_t>(s.page_table.data() - rows.pages.data()) / kPagesPerSequence;
    return 0;
  }
  std::vector<OracleRow> features_of(const Rows& rows, bool chains) const {
    std::vector<OracleRow> all;
    const Features kept = target_->features();
    for (const int64_t row : rows.feature_rows) {
      if (chains) {
        all.push_back(outputs_[static_cast<size_t>(row)]);
        continue;
      }
      const float* from = static_cast<const float*>(kept.data) + row * kept.width;
      all.emplace_back(from, from + kept.width);
    }
    return all;
  }

  OracleHead oracle_;
  std::vector<OracleCache> caches_;
  std::vector<OracleRow> outputs_;  // of the last pass
  ThreadPool pool_{3};
  std::unique_ptr<Model> target_, head_;
  KvCache target_kv_, head_kv_;
};

struct HeadFolder {
  TempFolder folder;
  std::unique_ptr<Checkpoint> checkpoint;
  Result<Eagle3Config> config = internal_error("not read");

  explicit HeadFolder(const Variant& variant) {
    const MakeTinyEagle3Options options{.target = target().folder.path(),
                                        .changes = variant.changes,
                                        .has_embedding = variant.has_embedding,
                                        .has_lm_head = variant.has_lm_head,
                                        .seed = 5};
    EXPECT_TRUE(is_ok(make_tiny_eagle3(folder.path(), options)));
    checkpoint = std::make_unique<Checkpoint>(Checkpoint::open(folder.path()).value());
    config = load_eagle3_config(folder.path(), target().config);
    EXPECT_TRUE(is_ok(config));
  }
};

const std::vector<int32_t> kFirst = {5, 17, 3, 250, 8, 8, 99, 40, 2}, kSecond = {260, 1, 33, 34, 35, 36};

// A prompt in each sequence, two chained tokens, and a verified pass that replaces what these left in the
// pages.
void compare_passes(Pair& pair, double limit, double least_error) {
  double worst = 0;
  const auto compare = [&](const char* pass, const Rows& rows, bool chains) {
    const auto [actual, expected] = pair.run_head(rows, chains);
    ASSERT_EQ(actual.size(), expected.size());
    EXPECT_TRUE(within_relative_l2(actual, expected, limit)) << pass;
    worst = std::max(worst, relative_l2(actual, expected));
  };
  pair.run_target(Rows({kFirst, kSecond}, {0, 0}));
  std::vector<int32_t> first(kFirst.begin() + 1, kFirst.end()), second(kSecond.begin() + 1, kSecond.end());
  first.push_back(71), second.push_back(120);
  Rows prompt({first, second}, {0, 0});
  prompt.feature_rows = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14};
  compare("prompt", prompt, false);
  Rows chained({{12}, {77}}, {9, 6});
  chained.feature_rows = {8, 14};
  compare("first chained row", chained, true);
  Rows again({{13}, {78}}, {10, 7});
  again.feature_rows = {0, 1};
  again.logit_rows = {1};
  compare("second chained row", again, true);
  pair.run_target(Rows({{71, 12, 13}, {120, 77, 78}}, {9, 6}));
  Rows verified({{12, 90}, {150}}, {9, 6});
  verified.feature_rows = {0, 1, 3};
  compare("verified rows", verified, false);
  Rows one({{}, {9}}, {0, 7});
  one.feature_rows = {2};
  compare("one sequence", one, true);
  compare("no rows", Rows(), false);
  EXPECT_GE(worst, least_error);
}

class Heads : public testing::TestWithParam<Variant> {};

TEST_P(Heads, MatchTheOracleInFloat32) {
  const HeadFolder head(GetParam());
  Pair pair(*head.checkpoint, *head.config, kFloat32, oracle_of(GetParam(), *head.checkpoint));
  compare_passes(pair, kFloat32Limit, 0);
}

TEST_P(Heads, AreNearTheOracleByDefault) {
  const HeadFolder head(GetParam());
  Pair pair(*head.checkpoint, *head.config, kDefault, oracle_of(GetParam(), *head.checkpoint));
  compare_passes(pair, kDefaultLimit, 1e-6);  // bf16 activations cannot be closer
}

INSTANTIATE_TEST_SUITE_P(Variants, Heads, testing::ValuesIn(kVariants),
                         [](const auto& p) { return std::string(p.param.name); });

// The features of a long prompt are mapped in several parts.
TEST(Eagle3Head, MapsManyRows) {
  const Variant& variant = kVariants[1];
  const HeadFolder head(variant);
  Pair pair(*head.checkpoint, *head.config, kFloat32, oracle_of(variant, *head.checkpoint));
  std::vector<int32_t> ids;
  for (int32_t t = 0; t < kMaxRows; ++t) ids.push_back(t * 37 % 300);
  Rows rows({ids}, {0});
  pair.run_target(rows);
  rows.feature_rows = rows.logit_rows;
  std::rotate(rows.ids.begin(), rows.ids.begin() + 1, rows.ids.end());
  rows.logit_rows = {0, 255, 256, 299};
  const auto [actual, expected] = pair.run_head(rows, false);
  EXPECT_TRUE(within_relative_l2(actual, expected, kFloat32Limit));
}

TEST(Eagle3Head, SpreadsTheDraftsIdsOverTheTargets) {
  const HeadFolder head(kVariants[0]);
  const Pair pair(*head.checkpoint, *head.config, kFloat32, oracle_of(kVariants[0], *head.checkpoint));
  const std::span<const int32_t> ids = pair.head().token_ids();
  ASSERT_EQ(ids.size(), 150u);
  for (size_t i = 0; i < ids.size(); ++i) EXPECT_EQ(ids[i], static_cast<int32_t>(2 * i));
  EXPECT_EQ(pair.head().config().vocab_size, 150);
  const HeadFolder whole(kVariants[7]);
  const Pair shared(*whole.checkpoint, *whole.config, kFloat32, oracle_of(kVariants[7], *whole.checkpoint));
  EXPECT_TRUE(shared.head().token_ids().empty());
  EXPECT_EQ(shared.head().config().vocab_size, 300);
}

// The same head under each set of names gives the same bits.
TEST(Eagle3Head, AcceptsEverySetOfNames) {
  const Variant& variant = kVariants[1];  // fc_norm
  const HeadFolder head(variant);
  const OracleHead oracle = oracle_of(variant, *head.checkpoint);
  const auto logits_of = [&](const Checkpoint& checkpoint) {
    Pair pair(checkpoint, *head.config, kDefault, oracle);
    pair.run_target(Rows({kFirst}, {0}));
    Rows rows({kFirst}, {0});
    rows.feature_rows = rows.logit_rows;
    return pair.run_head(rows, false).first;
  };
  const std::vector<float> expected = logits_of(*head.checkpoint);
  const std::pair<std::string, std::string> changes[] = {{"midlayer.", "layers.0."},
                                                         {"fc_norm.0.", "aux_norm_low."},
                                                         {"fc_norm.1.", "aux_norm_mid."},
                                                         {"fc_norm.2.", "aux_norm_high."}};
  for (const bool in_model : {false, true})
    for (const bool is_other : {false, true}) {
      ChangedCheckpoint changed(*head.checkpoint);
      for (const TensorEntry& tensor : head.checkpoint->tensors()) {
        std::string name = tensor.name;
        for (const auto& [from, to] : changes)
          if (is_other && name.starts_with(from)) name = to + name.substr(from.size());
        changed.rename(tensor.name, (in_model ? "model." : "") + name);
      }
      changed.add((in_model ? "model." : "") + std::string("layers.0.self_attn.rotary_emb.inv_freq"));
      EXPECT_EQ(logits_of(changed.make()), expected) << in_model << is_other;
    }
}

Status load_status(const Checkpoint& checkpoint, const Eagle3Config& config) {
  const Result<Checkpoint> tensors = eagle3_tensors(checkpoint, config);
  if (!tensors.ok()) return tensors.status();
  return eagle3_token_ids(*tensors, config).status();
}

TEST(Eagle3Head, RefusesTensorsThatTheConfigDoesNotExplain) {
  const HeadFolder head(kVariants[0]);
  EXPECT_TRUE(is_ok(load_status(*head.checkpoint, *head.config)));
  for (const char* name :
       {"input_norm.weight", "fc_norm.0.weight", "aux_norm_low.weight", "midlayer.self_attn.q_proj.bias",
        "fc.bias", "layers.1.input_layernorm.weight", "midlayer.self_attn.q_norm.weight", "other"}) {
    ChangedCheckpoint changed(*head.checkpoint);
    changed.add(name);
    EXPECT_TRUE(fails_with(load_status(changed.make(), *head.config), StatusCode::kUnsupported,
                           {"has tensor '" + std::string(name) + "'", "does not use"}));
  }
  ChangedCheckpoint doubled(*head.checkpoint);
  doubled.add("model.layers.0.hidden_norm.weight");
  EXPECT_TRUE(fails_with(load_status(doubled.make(), *head.config), StatusCode::kDataLoss,
                         {"'midlayer.hidden_norm.weight'", "'model.layers.0.hidden_norm.weight'"}));
}

TEST(Eagle3Head, RefusesToShareTensorsOfOtherSizes) {
  const HeadFolder part(kVariants[0]), narrow(kVariants[11]);
  for (const char* name : {"lm_head.weight", "d2t"}) {
    ChangedCheckpoint changed(*part.checkpoint);
    changed.remove(name);
    EXPECT_TRUE(fails_with(load_status(changed.make(), *part.config), StatusCode::kUnsupported,
                           {name, "draft_vocab_size = 150 of vocab_size = 300"}));
  }
  ChangedCheckpoint changed(*narrow.checkpoint);
  changed.remove("embed_tokens.weight");
  EXPECT_TRUE(fails_with(load_status(changed.make(), *narrow.config), StatusCode::kUnsupported,
                         {"model.embed_tokens.weight", "hidden_size = 32, target_hidden_size = 64"}));
}

TEST(Eagle3Head, RefusesMapsOutsideTheTargetsVocabulary) {
  const HeadFolder head(kVariants[0]);
  for (const int64_t offset : {int64_t{-1}, int64_t{300}, INT64_MAX, INT64_MIN}) {
    ChangedCheckpoint changed(*head.checkpoint);
    std::memcpy(changed.writable("d2t"), &offset, sizeof offset);
    EXPECT_TRUE(fails_with(load_status(changed.make(), *head.config), StatusCode::kDataLoss,
                           {"'d2t': id 0", "from 0 to 299"}));
  }
  ChangedCheckpoint twice(*head.checkpoint);
  const int64_t same = -1;  // id 1 means 0, as id 0 does
  std::memcpy(twice.writable("d2t") + 8, &same, sizeof same);
  EXPECT_TRUE(fails_with(load_status(twice.make(), *head.config), StatusCode::kDataLoss, {"different ids"}));
  ChangedCheckpoint other(*head.checkpoint);
  other.writable("t2d")[7] = 1;
  EXPECT_TRUE(fails_with(load_status(other.make(), *head.config), StatusCode::kDataLoss,
                         {"'t2d' differs from 'd2t' at id 7"}));
}

TEST(Eagle3Head, NamesTensorsOfOtherTypesAndShapes) {
  const HeadFolder head(kVariants[0]);
  EngineConfig flags;
  const ModelPlan plan = plan_model(target().config, flags).value();
  ThreadPool pool(1);
  const ModelOptions options{.act_dtype = plan.act_dtype,
                             .kv_dtype = plan.kv_dtype,
                             .isa = plan.isa,
                             .moe_plan = plan.moe,
                             .max_batch_tokens = 4};
  const auto model = Model::load(*target().checkpoint, target().config, options, pool, {});
  ASSERT_TRUE(is_ok(model));
  const auto load = [&](const ChangedCheckpoint& changed) {
    return load_eagle3_head(changed.make(), *head.config, options, **model, pool, {});
  };
  for (const char* name : {"fc.weight", "midlayer.mlp.up_proj.weight", "norm.weight", "lm_head.weight",
                           "midlayer.self_attn.k_proj.weight", "midlayer.hidden_norm.weight"}) {
    ChangedCheckpoint missing(*head.checkpoint), shape(*head.checkpoint), nan(*head.checkpoint);
    missing.remove(name);
    EXPECT_FALSE(load(missing).ok()) << name;
    shape.remove(name);
    shape.add(name, DType::kBF16, {3, 5});
    EXPECT_TRUE(fails_with(load(shape), StatusCode::kInvalidArgument, {eagle3_tensor_name(name), "[3, 5]"}));
    nan.writable(name)[1] = 0x7f, nan.writable(name)[0] = 0xc0;
    EXPECT_TRUE(fails_with(load(nan), StatusCode::kDataLoss, {eagle3_tensor_name(name)}));
  }
  // The dispatcher reads config.json beside the tensors.
  EXPECT_TRUE(is_ok(load_draft_model(
      *head.checkpoint, {DraftAlgorithm::kEagle3, head.config->layers, options}, **model, pool, {})));
}

}  // namespace
}  // namespace fp4moe
