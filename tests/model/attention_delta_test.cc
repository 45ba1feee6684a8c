// A gated delta net as it is loaded from both tensor layouts, by one rank and by several, against a layer
// whose projections are computed here, in double, from the rows that the layouts' definitions name.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>

#include "io/status_matchers.h"
#include "io/temp_folder.h"
#include "io/write/make_tiny.h"
#include "model/attention.h"
#include "model/plan_model.h"
#include "model/state_cache.h"
#include "model/weight_loader.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr int64_t kRows = 11, kCut = 4;  // two forward passes: rows before and after the cut
constexpr float kEps = 1e-6f;

// A layer's tensors in float, by their names below "linear_attn.".
class Tensors {
 public:
  explicit Tensors(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}
  std::vector<float> operator()(const std::string& name) const {
    const TensorView& view = checkpoint_.find("model.layers.0." + name)->view;
    std::vector<float> values(static_cast<size_t>(view.num_elems()));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = view.dtype == DType::kF32 ? view.as<float>()[i] : bf16_to_float(view.as<bf16>()[i]);
    return values;
  }
  bool has(const std::string& name) const { return checkpoint_.find("model.layers.0." + name) != nullptr; }

 private:
  const Checkpoint& checkpoint_;
};

// The projections' outputs for one row, all heads.
struct Projected {
  std::vector<float> qkv, z, b, a;
};

std::vector<float> multiply(const std::vector<float>& weight, const std::vector<double>& x) {
  std::vector<float> out;
  for (size_t row = 0; row < weight.size(); row += x.size()) {
    double sum = 0;
    for (size_t i = 0; i < x.size(); ++i) sum += double{weight[row + i]} * x[i];
    out.push_back(static_cast<float>(sum));
  }
  return out;
}

Projected project(const Tensors& tensors, const DeltaConfig& delta, const std::vector<double>& x) {
  if (tensors.has("linear_attn.in_proj_qkv.weight"))
    return {multiply(tensors("linear_attn.in_proj_qkv.weight"), x),
            multiply(tensors("linear_attn.in_proj_z.weight"), x),
            multiply(tensors("linear_attn.in_proj_b.weight"), x),
            multiply(tensors("linear_attn.in_proj_a.weight"), x)};
  // Qwen3-Next: reshaped to [Hk, q | k | v | z] and [Hk, b | a].
  const std::vector<float> qkvz = multiply(tensors("linear_attn.in_proj_qkvz.weight"), x),
                           ba = multiply(tensors("linear_attn.in_proj_ba.weight"), x);
  const auto heads = static_cast<size_t>(delta.num_key_heads), dk = static_cast<size_t>(delta.key_head_dim),
             n = static_cast<size_t>(delta.num_value_heads) / heads,
             dv = n * static_cast<size_t>(delta.value_head_dim);
  const auto column = [heads](const std::vector<float>& from, size_t first, size_t count) {
    std::vector<float> out;
    for (size_t head = 0; head < heads; ++head)
      for (size_t i = 0; i < count; ++i) out.push_back(from[head * (from.size() / heads) + first + i]);
    return out;
  };
  Projected out{column(qkvz, 0, dk), column(qkvz, 2 * dk + dv, dv), column(ba, 0, n), column(ba, n, n)};
  for (const std::vector<float>& part : {column(qkvz, dk, dk), column(qkvz, 2 * dk, dv)})
    out.qkv.insert(out.qkv.end(), part.begin(), part.end());
  return out;
}

std::vector<double> normed(const std::vector<float>& weight, const float* x) {
  double sum = 0;
  for (size_t i = 0; i < weight.size(); ++i) sum += double{x[i]} * x[i];
  std::vector<double> out;
  for (size_t i = 0; i < weight.size(); ++i)
    out.push_back(x[i] / std::sqrt(sum / static_cast<double>(weight.size()) + kEps) * (1.0 + weight[i]));
  return out;
}

class GatedDeltaLayer : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    ASSERT_TRUE(
        is_ok(make_tiny(folder_.path(), {.like = GetParam(), .dialect = "bf16", .num_hidden_layers = 2})));
    config_ = load_model_config(folder_.path()).value();
    checkpoint_ = std::make_unique<Checkpoint>(Checkpoint::open(folder_.path()).value());
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    x_.resize(static_cast<size_t>(kRows * config_.hidden_size));
    for (float& value : x_) value = normal(random);
  }

  // [kRows, Hv dv] of all heads.
  std::vector<float> expected() const {
    const Tensors tensors(*checkpoint_);
    const DeltaConfig& delta = config_.delta;
    Projected all;
    for (int64_t row = 0; row < kRows; ++row) {
      const Projected one = project(
          tensors, delta, normed(tensors("input_layernorm.weight"), x_.data() + row * config_.hidden_size));
      all.qkv.insert(all.qkv.end(), one.qkv.begin(), one.qkv.end());
      all.z.insert(all.z.end(), one.z.begin(), one.z.end());
      all.b.insert(all.b.end(), one.b.begin(), one.b.end());
      all.a.insert(all.a.end(), one.a.begin(), one.a.end());
    }
    std::vector<float> decay = tensors("linear_attn.A_log");
    for (float& value : decay) value = -std::exp(value);
    const std::vector<float> conv = tensors("linear_attn.conv1d.weight"),
                             dt_bias = tensors("linear_attn.dt_bias"),
                             norm = tensors("linear_attn.norm.weight");
    const StateCache states = StateCache::make(config_, 2).value();
    const SequenceRows sequence{.num_rows = kRows, .slot = 1};
    const int64_t cols = delta.num_value_heads * delta.value_head_dim;
    std::vector<float> out(static_cast<size_t>(kRows * cols));
    GatedDeltaArgs args{.qkv = all.qkv.data(),
                        .z = all.z.data(),
                        .b = all.b.data(),
                        .a = all.a.data(),
                        .qkv_stride = delta.conv_channels(),
                        .z_stride = cols,
                        .ba_stride = delta.num_value_heads,
                        .conv_weight = conv.data(),
                        .decay = decay.data(),
                        .dt_bias = dt_bias.data(),
                        .norm_weight = norm.data(),
                        .eps = kEps,
                        .num_key_heads = static_cast<int>(delta.num_key_heads),
                        .num_value_heads = static_cast<int>(delta.num_value_heads),
                        .key_head_dim = static_cast<int>(delta.key_head_dim),
                        .value_head_dim = static_cast<int>(delta.value_head_dim),
                        .conv_width = static_cast<int>(delta.conv_width),
                        .slots = states.layer(0),
                        .sequences = {&sequence, 1},
                        .out = {out.data(), DType::kF32, kRows, cols}};
    ThreadPool pool(1);
    ref_dense_ops().gated_delta(args, pool);
    return out;
  }

  // The columns of one of `ranks` ranks, in two forward passes.
  Result<std::vector<float>> output(int ranks, int rank) const {
    EngineConfig flags;
    flags.dtype = "float32";
    flags.tp_size = ranks;
    FP4MOE_ASSIGN_OR_RETURN(const ModelPlan plan, plan_model(config_, flags));
    ThreadPool pool(2);
    ModelOptions options{
        .act_dtype = plan.act_dtype, .isa = plan.isa, .moe_plan = plan.moe, .max_batch_tokens = kRows};
    options.rank.layout = plan.moe.problem().layout;
    options.rank.layout.rank = rank;
    const ProgressSink no_progress;
    WeightLoader loader(*checkpoint_, config_, options, pool, no_progress);
    FP4MOE_ASSIGN_OR_RETURN(const auto layer, load_gated_delta(loader, "model.layers.0.linear_attn."));
    FP4MOE_ASSIGN_OR_RETURN(const Buffer norm,
                            loader.norm("model.layers.0.input_layernorm.weight", config_.hidden_size));
    FP4MOE_ASSIGN_OR_RETURN(Arena scratch, Arena::make(layer->scratch_bytes(kRows)));
    FP4MOE_ASSIGN_OR_RETURN(const StateCache states, StateCache::make(config_, 3, options.rank.layout));
    const int64_t h = config_.hidden_size;
    std::vector<float> acts(x_.size()), out(static_cast<size_t>(kRows * layer->out_cols()));
    for (const auto& [first, rows] : {std::pair<int64_t, int64_t>{0, kCut}, {kCut, kRows - kCut}}) {
      const SequenceRows sequence{.num_rows = rows, .first_position = first, .slot = 2};
      const Batch batch{{}, {}, {&sequence, 1}, {}};
      scratch.reset();
      layer->forward_attention(
          {.batch = batch,
           .norm = {.x = x_.data() + first * h,
                    .weight = norm.as<float>(),
                    .eps = kEps,
                    .out_act = {acts.data(), DType::kF32, rows, h}},
           .state = states.layer(0),
           .out = {out.data() + first * layer->out_cols(), DType::kF32, rows, layer->out_cols()}},
          scratch, pool);
    }
    return out;
  }

  TempFolder folder_;
  ModelConfig config_;
  std::unique_ptr<Checkpoint> checkpoint_;
  std::vector<float> x_;
};

TEST_P(GatedDeltaLayer, EveryRankHasTheColumnsOfItsHeads) {
  const std::vector<float> all = expected();
  const int64_t cols = std::ssize(all) / kRows;
  for (const int ranks : {1, 2, 4})
    for (int rank = 0; rank < ranks; ++rank) {
      const auto mine = output(ranks, rank);
      ASSERT_TRUE(is_ok(mine));
      const int64_t count = cols / ranks;
      ASSERT_EQ(std::ssize(*mine), kRows * count);
      std::vector<float> wanted;
      for (int64_t row = 0; row < kRows; ++row) {
        const auto first = all.begin() + row * cols + rank * count;
        wanted.insert(wanted.end(), first, first + count);
      }
      EXPECT_TRUE(within_relative_l2(*mine, wanted, 1e-5)) << "rank " << rank << " of " << ranks;
    }
}

TEST_P(GatedDeltaLayer, RanksThatDoNotDivideTheKeyHeadsAreRefused) {
  EngineConfig flags;
  config_.num_heads = config_.num_kv_heads = 3;
  flags.tp_size = 3;
  EXPECT_TRUE(fails_with(plan_model(config_, flags), StatusCode::kUnsupported, {"4 key heads", "3 ranks"}));
}

INSTANTIATE_TEST_SUITE_P(Layouts, GatedDeltaLayer, testing::Values("qwen3-next-tiny", "qwen3.5-moe-tiny"),
                         [](const auto& test) { return test.index == 0 ? "grouped" : "separate"; });

}  // namespace
}  // namespace fp4moe
