// Compares the few-token layer with double loops over the dequantised weights.
#include "kernels/cuda/experts/few_tokens.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "device/graph.h"
#include "device/stream.h"
#include "kernels/cuda/guarded_memory.h"
#include "kernels/cuda/layout/host_tiles.h"
#include "kernels/cuda/layout/tile_layout.h"
#include "kernels/expert_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

struct Shape {
  Fp4Format format = Fp4Format::kMxfp4;
  int64_t num_experts = 4, hidden = 64, intermediate = 32;
  ActivationKind activation = ActivationKind::kSwigluOai;
  bool bias = true;
};

std::string name_of(const Shape& s) {
  return std::string(fp4_format_name(s.format)) + "_L" + std::to_string(s.num_experts) + "_H" +
         std::to_string(s.hidden) + "_I" + std::to_string(s.intermediate) + "_act" +
         std::to_string(static_cast<int>(s.activation)) + (s.bias ? "_bias" : "");
}

// L random experts on host and device.
class Experts {
 public:
  explicit Experts(const Shape& shape, uint64_t seed = 7) : shape_(shape) {
    Random random(seed);
    const bool gated = is_gated(shape.activation);
    const int64_t h = shape.hidden, i = shape.intermediate, up_rows = gated ? 2 * i : i;
    const int64_t up_bytes = tiled_bytes(shape.format, up_rows, h),
                  down_bytes = tiled_bytes(shape.format, h, i);
    std::vector<uint8_t> up_tiles(static_cast<size_t>(shape.num_experts * up_bytes));
    std::vector<uint8_t> down_tiles(static_cast<size_t>(shape.num_experts * down_bytes));
    std::vector<float> scales;
    for (int64_t e = 0; e < shape.num_experts; ++e) {
      const Fp4Matrix gate(shape.format, i, h, random), up(shape.format, i, h, random),
          down(shape.format, h, i, random);
      uint8_t* tiles = up_tiles.data() + e * up_bytes;
      GateUpFactors f;
      if (gated)
        f = pack_gate_up_tiles(gate.view(), up.view(), tiles).value();
      else
        f.up = pack_tiles(up.view(), tiles).value();
      const float down_factor = pack_tiles(down.view(), down_tiles.data() + e * down_bytes).value();
      scales.insert(scales.end(), {f.gate * gate.view().tensor_scale, f.up * up.view().tensor_scale,
                                   down_factor * down.view().tensor_scale});
      gate_.push_back(decoded(gate.view())), up_.push_back(decoded(up.view()));
      down_.push_back(decoded(down.view()));
    }
    up_bias_ = random.normal(shape.num_experts * up_rows, 0.2f);
    down_bias_ = random.normal(shape.num_experts * h, 0.2f);
    tiles_.emplace_back(up_tiles), tiles_.emplace_back(down_tiles), tiles_.emplace_back(up_bias_);
    tiles_.emplace_back(down_bias_), tiles_.emplace_back(scales);
  }

  const Shape& shape() const { return shape_; }
  TiledExperts view() const {
    return {.format = shape_.format,
            .num_experts = shape_.num_experts,
            .hidden_size = shape_.hidden,
            .intermediate_size = shape_.intermediate,
            .activation = {.kind = shape_.activation},
            .gate_up = tiles_[0].data(),
            .down = tiles_[1].data(),
            .gate_up_bias = shape_.bias ? tiles_[2].as<float>() : nullptr,
            .down_bias = shape_.bias ? tiles_[3].as<float>() : nullptr,
            .scales = tiles_[4].as<float>()};
  }

  // Returns expert e's output for one row before the router's weight is applied. Sets `magnitude` to the sums
  // of the absolute values of the terms.
  std::vector<double> apply(int64_t e, const float* x, std::vector<double>* magnitude) const {
    const int64_t h = shape_.hidden, i_size = shape_.intermediate;
    const bool gated = is_gated(shape_.activation);
    const auto dot = [](const float* a, const float* b, int64_t n) {
      double sum = 0;
      for (int64_t k = 0; k < n; ++k) sum += static_cast<double>(a[k]) * b[k];
      return sum;
    };
    std::vector<float> inner(static_cast<size_t>(i_size));
    const size_t at = static_cast<size_t>(e);
    for (int64_t i = 0; i < i_size; ++i) {
      const double b0 = shape_.bias ? up_bias_[static_cast<size_t>(e * i_size * (gated ? 2 : 1) + i)] : 0;
      const double b1 = shape_.bias && gated ? up_bias_[static_cast<size_t>(e * i_size * 2 + i_size + i)] : 0;
      const double gate = gated ? dot(x, &gate_[at][static_cast<size_t>(i * h)], h) + b0 : 0;
      const double up = dot(x, &up_[at][static_cast<size_t>(i * h)], h) + (gated ? b1 : b0);
      inner[static_cast<size_t>(i)] = round_to_bf16(static_cast<float>(activate(gate, up)));
    }
    std::vector<double> out(static_cast<size_t>(h));
    for (int64_t c = 0; c < h; ++c) {
      const float* row = &down_[at][static_cast<size_t>(c * i_size)];
      const double bias = shape_.bias ? down_bias_[static_cast<size_t>(e * h + c)] : 0;
      out[static_cast<size_t>(c)] = dot(inner.data(), row, i_size) + bias;
      double sum = std::fabs(bias);
      for (int64_t i = 0; i < i_size; ++i)
        sum += std::fabs(static_cast<double>(inner[static_cast<size_t>(i)]) * row[i]);
      (*magnitude)[static_cast<size_t>(c)] = sum;
    }
    return out;
  }

 private:
  static std::vector<float> decoded(const Fp4MatrixView& m) {
    std::vector<float> values(static_cast<size_t>(m.rows * m.cols));
    for (int64_t r = 0; r < m.rows; ++r) fp4_dequantize_row(m, r, &values[static_cast<size_t>(r * m.cols)]);
    return values;
  }
  double activate(double gate, double up) const {
    const Activation act{.kind = shape_.activation};
    if (act.kind == ActivationKind::kRelu2) return up < 0 ? 0 : up * up;
    if (act.kind == ActivationKind::kSilu) return gate / (1 + std::exp(-gate)) * up;
    const double g = gate > act.limit ? act.limit : gate;
    const double u = up > act.limit ? act.limit : (up < -act.limit ? -act.limit : up);
    return g / (1 + std::exp(-act.alpha * g)) * (u + act.beta);
  }

  Shape shape_;
  std::vector<std::vector<float>> gate_, up_, down_;
  std::vector<float> up_bias_, down_bias_;
  std::vector<Guarded> tiles_;
};

struct Batch {
  int64_t num_tokens = 0, topk = 1, first_expert = 0;
  std::vector<float> x;  // rounded to bf16
  std::vector<int32_t> ids;
  std::vector<float> weights;
  bool has_shared = false;  // the last of the experts is a shared expert
  std::vector<float> gate;  // its gate, or empty
};

// Returns a batch whose tokens each have distinct random ids in [0, num_ids).
Batch random_batch(int64_t num_tokens, int64_t topk, int64_t hidden, int64_t num_ids, uint64_t seed) {
  Random random(seed);
  Batch b{num_tokens, topk, 0, random.normal(num_tokens * hidden), {}, {}, false, {}};
  for (float& v : b.x) v = round_to_bf16(v);
  for (int64_t t = 0; t < num_tokens; ++t)
    while (static_cast<int64_t>(b.ids.size()) < (t + 1) * topk) {
      const auto id = static_cast<int32_t>(random.integer(0, num_ids - 1));
      if (std::find(b.ids.begin() + t * topk, b.ids.end(), id) == b.ids.end()) b.ids.push_back(id);
    }
  for (int64_t i = 0; i < num_tokens * topk; ++i)
    b.weights.push_back(static_cast<float>(random.integer(1, 100)) / 100.0f);
  return b;
}

// Runs all calls on one workspace.
class Runner {
 public:
  explicit Runner(const Experts& experts)
      : experts_(experts),
        counters_(kMoeCounterBytes, 0),
        workspace_(few_tokens_workspace_bytes(experts.view(), kMaxPairs)),
        stream_(Stream::make().value()) {}

  struct Output {
    std::vector<float> f32, b16;
  };
  // out starts as NaN, or as `before` if that is given; the call then accumulates.
  Output run(const Batch& b, const std::vector<float>* before = nullptr) {
    return replay(b, before, 1).front();
  }
  // Returns the outputs of the first and the last of `times` replays of a captured call, or the output of one
  // eager call if `times` is 1.
  std::vector<Output> replay(const Batch& b, const std::vector<float>* before, int times) {
    const int64_t h = experts_.shape().hidden, n = b.num_tokens * h;
    const Guarded x(to_bf16(b.x)), ids(b.ids), weights(b.weights);
    const bool one_expert = b.ids.empty();
    const Guarded out = before != nullptr ? Guarded(*before) : Guarded(n * 4);
    const Guarded out_bf16(n * 2);
    const Guarded gate(b.gate), x_f32(b.x);
    DeviceMoeArgs args = {.experts = experts_.view(),
                          .x = x.as<bf16>(),
                          .ids = one_expert ? nullptr : ids.as<int32_t>(),
                          .weights = one_expert ? nullptr : weights.as<float>(),
                          .num_tokens = b.num_tokens,
                          .topk = b.topk,
                          .first_expert = b.first_expert,
                          .out = out.as<float>(),
                          .accumulate = before != nullptr,
                          .out_bf16 = out_bf16.as<bf16>(),
                          .counters = counters_.data(),
                          .workspace = workspace_.data()};
    if (b.has_shared) {
      --args.experts.num_experts;
      args.shared = {true, b.gate.empty() ? nullptr : gate.as<float>(), x_f32.as<float>()};
    }
    EXPECT_TRUE(few_tokens_fits(args));
    StreamScope scope(stream_);
    std::vector<Output> outputs;
    const auto take = [&] {
      const Status status = stream_.synchronize();
      EXPECT_TRUE(status.ok()) << status.message();
      outputs.push_back({out.values<float>(), to_float(out_bf16.values<bf16>())});
    };
    if (times == 1) {
      few_tokens_layer(args);
      take();
      counters_.values<uint8_t>(), workspace_.values<uint8_t>();
      return outputs;
    }
    const Graph graph = Graph::capture(stream_, [&] {
                          few_tokens_layer(args);
                          return Status();
                        }).value();
    for (int i = 0; i < times; ++i) {
      graph.launch(stream_);
      if (i == 0 || i == times - 1) take();
    }
    return outputs;
  }
  void poison() { workspace_.fill(0, few_tokens_workspace_bytes(experts_.view(), kMaxPairs), kNanByte); }

  // Compares run() with the double loops.
  void check(const Batch& b, const std::vector<float>* before = nullptr) {
    const Output actual = run(b, before);
    const int64_t h = experts_.shape().hidden,
                  terms = experts_.shape().intermediate + experts_.shape().hidden;
    std::vector<float> expected, budget;
    for (int64_t t = 0; t < b.num_tokens; ++t) {
      std::vector<double> sum(static_cast<size_t>(h)), most(sum.size()), magnitude(sum.size());
      const int64_t shared = experts_.shape().num_experts - 1;
      for (int64_t k = 0; k < b.topk + b.has_shared; ++k) {
        const bool is_shared = k == b.topk;
        const int64_t e = is_shared       ? shared
                          : b.ids.empty() ? 0
                                          : b.ids[static_cast<size_t>(t * b.topk + k)] - b.first_expert;
        if (e < 0 || e >= experts_.shape().num_experts || (!is_shared && b.has_shared && e == shared))
          continue;
        const double weight = is_shared       ? gate_weight(b, t)
                              : b.ids.empty() ? 1
                                              : b.weights[static_cast<size_t>(t * b.topk + k)];
        const std::vector<double> y = experts_.apply(e, &b.x[static_cast<size_t>(t * h)], &magnitude);
        for (size_t c = 0; c < sum.size(); ++c)
          sum[c] += weight * y[c], most[c] += std::fabs(weight) * magnitude[c];
      }
      for (size_t c = 0; c < sum.size(); ++c) {
        const double old = before != nullptr ? (*before)[static_cast<size_t>(t * h) + c] : 0;
        expected.push_back(static_cast<float>(old + sum[c]));
        // Bounds the error of the f32 sums, which can also round a value of h to the next bf16.
        budget.push_back(static_cast<float>((kBf16Eps + static_cast<double>(terms) * kF32Eps) * most[c] +
                                            4 * kF32Eps * std::fabs(old + sum[c])));
      }
    }
    EXPECT_TRUE(within_budget(actual.f32, expected, budget));
    EXPECT_TRUE(within_relative_l2(actual.f32, expected, kBf16Eps / 8));
    std::vector<float> rounded;
    for (float v : actual.f32) rounded.push_back(round_to_bf16(v));
    EXPECT_TRUE(same_bits(actual.b16, rounded));
  }

 private:
  double gate_weight(const Batch& b, int64_t t) const {
    if (b.gate.empty()) return 1;
    double sum = 0;
    for (size_t i = 0; i < b.gate.size(); ++i)
      sum += static_cast<double>(b.gate[i]) * b.x[static_cast<size_t>(t) * b.gate.size() + i];
    return 1 / (1 + std::exp(-sum));
  }

  static constexpr int64_t kMaxPairs = 64;
  const Experts& experts_;
  Guarded counters_, workspace_;
  Stream stream_;
};

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (Fp4Format format : {Fp4Format::kMxfp4, Fp4Format::kNvfp4})
    for (const Shape& s : {Shape{format, 1, 32, 32}, Shape{format, 4, 64, 32}, Shape{format, 5, 96, 160},
                           Shape{format, 8, 320, 96, ActivationKind::kSilu, false},
                           Shape{format, 9, 544, 288, ActivationKind::kRelu2, true},
                           Shape{format, 3, 160, 1056, ActivationKind::kRelu2, false},
                           Shape{format, 64, 256, 128, ActivationKind::kSilu, true}})
      all.push_back(s);
  return all;
}

class FewTokens : public testing::TestWithParam<Shape> {};

TEST_P(FewTokens, MatchesDoubleLoopsForEveryNumberOfTokens) {
  const Experts experts(GetParam());
  Runner runner(experts);
  const int64_t e = GetParam().num_experts;
  for (int64_t t = 0; t <= 8; ++t)
    for (int64_t topk : {int64_t{1}, std::min<int64_t>(e, 3), std::min<int64_t>(e, 8)}) {
      SCOPED_TRACE("T " + std::to_string(t) + " topk " + std::to_string(topk));
      runner.poison();
      runner.check(random_batch(t, topk, GetParam().hidden, e, static_cast<uint64_t>(t * 10 + topk)));
    }
}

TEST_P(FewTokens, DropsWhatIsNotLocal) {
  const Experts experts(GetParam());
  Runner runner(experts);
  const int64_t e = GetParam().num_experts;
  Batch b = random_batch(6, std::min<int64_t>(3 * e, 8), GetParam().hidden, 3 * e, 5);
  b.first_expert = e;
  b.ids[0] = -1, b.ids[1] = std::numeric_limits<int32_t>::min(),
  b.ids[2] = std::numeric_limits<int32_t>::max();
  b.weights[0] = NAN;
  runner.check(b);
}

// An id of the shared expert among the routed ones names no expert.
TEST_P(FewTokens, ASharedExpertIsTheLastOfEveryToken) {
  const Experts experts(GetParam());
  Runner runner(experts);
  const int64_t e = GetParam().num_experts, h = GetParam().hidden;
  if (e == 1) GTEST_SKIP() << "there is no other expert";
  for (const bool has_gate : {false, true})
    for (const int64_t topk : {int64_t{1}, std::min<int64_t>(e, 8)})
      for (const int64_t t : {int64_t{1}, int64_t{3}, 64 / (topk + 1) < 8 ? 64 / (topk + 1) : int64_t{8}}) {
        SCOPED_TRACE("T " + std::to_string(t) + " topk " + std::to_string(topk));
        Batch b = random_batch(t, topk, h, e, static_cast<uint64_t>(t * 10 + topk));
        b.has_shared = true;
        if (has_gate) b.gate = Random(9).normal(h, 0.2f);
        runner.poison();
        runner.check(b);
      }
}

INSTANTIATE_TEST_SUITE_P(Shapes, FewTokens, testing::ValuesIn(shapes()),
                         [](const auto& p) { return name_of(p.param); });

class FewTokensCases : public testing::Test {
 protected:
  Shape shape_{Fp4Format::kMxfp4, 6, 416, 224};
  Experts experts_{shape_};
  Runner runner_{experts_};
};

TEST_F(FewTokensCases, NoLocalExpertGivesZeros) {
  Batch b = random_batch(5, 4, shape_.hidden, 6, 1);
  b.first_expert = 100;
  const Runner::Output out = runner_.run(b);
  EXPECT_TRUE(same_bits(out.f32, std::vector<float>(out.f32.size(), 0)));
  EXPECT_TRUE(same_bits(out.b16, std::vector<float>(out.b16.size(), 0)));
  b.first_expert = 0;
  runner_.check(b);
}

TEST_F(FewTokensCases, NoLocalExpertLeavesWhatIsAccumulated) {
  Batch b = random_batch(3, 4, shape_.hidden, 6, 1);
  b.first_expert = -50;
  const std::vector<float> before = Random(3).normal(3 * shape_.hidden);
  EXPECT_TRUE(same_bits(runner_.run(b, &before).f32, before));
}

TEST_F(FewTokensCases, AddsToWhatOutHolds) {
  const std::vector<float> before = Random(3).normal(7 * shape_.hidden);
  runner_.check(random_batch(7, 4, shape_.hidden, 6, 2), &before);
}

TEST_F(FewTokensCases, AllToOneExpert) {
  Batch b = random_batch(8, 1, shape_.hidden, 6, 3);
  std::fill(b.ids.begin(), b.ids.end(), 4);
  runner_.check(b);
}

TEST_F(FewTokensCases, NoIdsMeanTheFirstExpert) {
  Batch b = random_batch(5, 1, shape_.hidden, 6, 3);
  b.ids.clear();
  b.first_expert = 7;
  runner_.check(b);
}

TEST_F(FewTokensCases, AnExpertTwiceInOneToken) {
  Batch b = random_batch(8, 8, shape_.hidden, 64, 4);
  for (size_t i = 0; i < b.ids.size(); ++i) b.ids[i] = static_cast<int32_t>(i % 5 % 3);
  runner_.check(b);
  std::fill(b.ids.begin(), b.ids.end(), 5);
  runner_.check(b);
}

TEST_F(FewTokensCases, NanStaysInItsToken) {
  Batch b = random_batch(8, 3, shape_.hidden, 6, 5);
  const Runner::Output clean = runner_.run(b);
  b.x[static_cast<size_t>(3 * shape_.hidden + 17)] = NAN;
  const Runner::Output out = runner_.run(b);
  for (size_t i = 0; i < out.f32.size(); ++i) {
    const bool poisoned = static_cast<int64_t>(i) / shape_.hidden == 3;
    ASSERT_EQ(std::isnan(out.f32[i]), poisoned) << i;
    ASSERT_TRUE(poisoned || out.f32[i] == clean.f32[i]) << i;
  }
}

TEST_F(FewTokensCases, OneWorkspaceServesCallsOfAllSizes) {
  for (int64_t round = 0; round < 40; ++round)
    runner_.check(random_batch(round * 5 % 9, 1 + round % 6, shape_.hidden, 6, static_cast<uint64_t>(round)));
}

TEST(FewTokensLarge, SameBitsOnEveryReplay) {
  const Shape shape{Fp4Format::kMxfp4, 4, 2880, 2880};
  const Experts experts(shape);
  Runner runner(experts);
  for (int64_t t : {1, 5, 8}) {
    const Batch b = random_batch(t, 3, shape.hidden, 4, static_cast<uint64_t>(t));
    const std::vector<Runner::Output> outputs = runner.replay(b, nullptr, 300);
    EXPECT_TRUE(same_bits(outputs[0].f32, outputs[1].f32));
    EXPECT_TRUE(same_bits(outputs[0].f32, runner.run(b).f32));
  }
}

TEST(FewTokensLarge, PublishedSizes) {
  for (const Shape& shape : {Shape{Fp4Format::kMxfp4, 2, 2880, 2880},
                             Shape{Fp4Format::kNvfp4, 2, 7168, 2048, ActivationKind::kSilu, false},
                             Shape{Fp4Format::kMxfp4, 2, 2048, 768, ActivationKind::kSilu, false}}) {
    SCOPED_TRACE(name_of(shape));
    const Experts experts(shape);
    Runner runner(experts);
    for (int64_t t : {1, 8}) runner.check(random_batch(t, 2, shape.hidden, 2, 11));
  }
}

TEST(FewTokensFits, LooksAtSizes) {
  DeviceMoeArgs args = {.experts = {.num_experts = 8, .hidden_size = 7168, .intermediate_size = 2048},
                        .num_tokens = 8,
                        .topk = 8};
  EXPECT_TRUE(few_tokens_fits(args));
  args.num_tokens = 9;
  EXPECT_FALSE(few_tokens_fits(args));
  args.num_tokens = 8, args.topk = 9;
  EXPECT_FALSE(few_tokens_fits(args));
  args.topk = 8, args.shared.exists = true;
  EXPECT_FALSE(few_tokens_fits(args));
  args.num_tokens = 7;
  EXPECT_TRUE(few_tokens_fits(args));
  args.num_tokens = 8, args.shared = {}, args.experts.hidden_size = 1 << 14;
  EXPECT_FALSE(few_tokens_fits(args));
  args.num_tokens = 0;
  EXPECT_TRUE(few_tokens_fits(args));
}

}  // namespace
}  // namespace fp4moe
