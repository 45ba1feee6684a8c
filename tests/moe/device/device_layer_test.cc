// Compares whole layers on every GPU row of the table with the oracle row on a CPU: routed experts, with and
// without a shared expert.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "device/device.h"
#include "device/device_memory.h"
#include "device/graph.h"
#include "device/side_stream.h"
#include "device/stream.h"
#include "kernels/cuda/device_array.h"
#include "moe/layer_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct NamedNumerics {
  const char* name;
  const char* fp4_compute;
  const char* act_scales;
  double budget;  // relative L2 against the oracle; w4a4: codes flip where sums differ in the last bits
};
// Budget of w4a8 where the FP8 matrix unit sums with about 14 bits, which flips codes of the intermediate.
constexpr double kWideFp8 = 2e-2;
constexpr NamedNumerics kNumerics[] = {{"w4a16", "w4a16", "auto", 3e-3},
                                       {"w4a4_static", "w4a4", "static", 3e-2},
                                       {"w4a4_per_token", "w4a4", "per_token", 3e-2},
                                       {"w4a8", "w4a8", "auto", 5e-3}};

// A shared expert's weights, FP4 or bf16.
struct MlpCase {
  MlpCase(Fp4Format format, bool is_fp4, int64_t hidden, int64_t intermediate)
      : experts({hidden, intermediate, 1, 1}, format, ActivationKind::kSilu, 7) {
    const ExpertWeightsView& w = experts.weights.experts[0];
    view = {hidden, intermediate, {}, {}, {}};
    const auto fill = [&](LinearWeightsView& to, const Fp4MatrixView& fp4, float scale) {
      to.n = fp4.rows;
      to.k = fp4.cols;
      to.is_fp4 = is_fp4;
      to.fp4 = fp4;
      to.input_scale = scale;
      values.push_back(to_bf16(experts.random.normal(fp4.rows * fp4.cols, 0.1f)));
    };
    fill(view.gate, w.gate, w.gate_input_scale);
    fill(view.up, w.up, w.up_input_scale);
    fill(view.down, w.down, w.down_input_scale);
    if (is_fp4) return;
    view.gate.weight = values[0].data();
    view.up.weight = values[1].data();
    view.down.weight = values[2].data();
  }

  ExpertsCase experts;
  std::vector<std::vector<bf16>> values;
  MlpWeightsView view;
};

class DeviceLayerTest
    : public testing::TestWithParam<std::tuple<const RunnerRow*, Fp4Format, NamedNumerics>> {
 protected:
  const RunnerRow& row() const { return *std::get<0>(GetParam()); }
  Fp4Format format() const { return std::get<1>(GetParam()); }
  const NamedNumerics& numerics() const { return std::get<2>(GetParam()); }

  void SetUp() override {
    const DeviceChoice device = *resolve_device("cuda", 0);
    if (device.compute_capability < row().min_compute || device.compute_capability > row().max_compute)
      GTEST_SKIP() << "this GPU does not run " << row().name;
    compute_capability_ = device.compute_capability;
    stream_ = std::move(*Stream::make());
  }

  MoeProblem on_device(MoeProblem p) const {
    p.device = DeviceKind::kCuda;
    p.compute_capability = compute_capability_;
    return p;
  }
  MoePlan plan(const MoeProblem& p) const {
    Result<MoePlan> made = plan_moe(
        on_device(p),
        {.runner = row().name, .fp4_compute = numerics().fp4_compute, .act_scales = numerics().act_scales});
    EXPECT_TRUE(made.ok()) << made.status().to_string();
    return std::move(*made);
  }
  // The format of the oracle's experts: bf16 experts are also given as MXFP4.
  Fp4Format fp4_format() const { return format() == Fp4Format::kNone ? Fp4Format::kMxfp4 : format(); }
  MoePlan oracle_plan(MoeProblem p) const {
    const char* oracle = oracle_row(plan(p).numerics()).name;
    p.format = fp4_format();
    return std::move(*plan_moe(
        p, {.runner = oracle, .fp4_compute = numerics().fp4_compute, .act_scales = numerics().act_scales}));
  }

  // Runs `work`, launched or as a graph, and waits for it.
  Status run_work(const std::function<Status()>& work, bool in_graph) {
    if (!in_graph) {
      FP4MOE_RETURN_IF_ERROR(work());
      return stream_.synchronize();
    }
    FP4MOE_ASSIGN_OR_RETURN(const Graph graph, Graph::capture(stream_, work));
    graph.launch(stream_);
    return stream_.synchronize();
  }

  // Computes residual + layer(x), launched twice and once as a graph; the residual is a ramp.
  std::vector<float> on_gpu(LayerCase& c, const std::vector<float>& x, const SharedExpertWeights* shared) {
    return on_gpu(plan(c.problem), c, x, shared);
  }
  std::vector<float> on_gpu(const MoePlan& p, LayerCase& c, const std::vector<float>& x,
                            const SharedExpertWeights* shared) {
    StreamScope scope(stream_);
    auto layer = MoeLayer::make(p, *cuda_dense_ops(), c.router, c.weights, shared, pool_);
    EXPECT_TRUE(layer.ok()) << layer.status().to_string();
    const int64_t tokens = std::ssize(x) / c.problem.hidden_size;
    const auto transport = std::move(*make_transport(p, {.max_group_rows = tokens}));
    const DeviceArray<bf16> act(to_bf16(x));
    const DeviceArray<float> router_x(x);
    const int64_t scratch_bytes = (*layer)->scratch_bytes(tokens, *transport);
    Arena scratch = std::move(*Arena::make(scratch_bytes, device_memory()));
    const std::vector<uint8_t> poison(static_cast<size_t>(scratch_bytes), 0xff);
    if (scratch_bytes > 0) {
      EXPECT_TRUE(
          device_memory().upload(scratch.take<uint8_t>(scratch_bytes), poison.data(), scratch_bytes).ok());
    }
    std::vector<float> first;
    for (int repeat = 0; repeat < 3; ++repeat) {  // same bits every time: the layer resets its counters
      const DeviceArray<float> residual(c.ramp(tokens));
      const ActRows rows = {act.data(), DType::kBF16, tokens, c.problem.hidden_size};
      const auto forward = [&] {
        scratch.reset();
        return (*layer)->forward_moe({0, rows, router_x.data(), residual.data()}, *transport, scratch, pool_);
      };
      const Status status = run_work(forward, /*in_graph=*/repeat == 2);
      EXPECT_TRUE(status.ok()) << status.to_string();
      const std::vector<float> out = residual.values();
      if (repeat == 0) first = out;
      EXPECT_TRUE(same_bits(out, first));
    }
    return first;
  }

  // Each rank chooses per-row scales for its part of a row, so the ranks round differently from the whole
  // layer.
  double group_budget() const {
    if (std::string_view(numerics().name) == "w4a4_per_token") return 8e-2;
    return std::string_view(numerics().name) == "w4a8" ? 5e-2 : numerics().budget;
  }
  // Returns the sum of the partial outputs of a group's ranks, which is the layer's output without the
  // residual.
  std::vector<float> sum_of_ranks(LayerCase& c, const std::vector<float>& x,
                                  const SharedExpertWeights* shared, int num_ranks, int ep) {
    const MoePlan whole = *plan_moe(on_device(c.problem), {.runner = row().name,
                                                           .fp4_compute = numerics().fp4_compute,
                                                           .act_scales = numerics().act_scales,
                                                           .tp = num_ranks,
                                                           .ep = ep});
    StreamScope scope(stream_);
    const int64_t tokens = std::ssize(x) / c.problem.hidden_size;
    const DeviceArray<bf16> act(to_bf16(x));
    const DeviceArray<float> router_x(x);
    std::vector<float> sum(x.size());
    for (int rank = 0; rank < num_ranks; ++rank) {
      const MoePlan p = whole.at_rank(rank);
      auto layer = std::move(*MoeLayer::make(p, *cuda_dense_ops(), c.router, c.weights, shared, pool_));
      const auto transport = std::move(*make_transport(p, {.max_group_rows = tokens}));
      Arena scratch = std::move(*Arena::make(layer->scratch_bytes(tokens, *transport), device_memory()));
      const DeviceArray<float> partial(std::vector<float>(x.size(), kNaN)), residual(c.ramp(tokens));
      MoeForwardArgs args{
          0, {act.data(), DType::kBF16, tokens, c.problem.hidden_size}, router_x.data(), residual.data()};
      args.partial = partial.data();
      EXPECT_TRUE(layer->forward_moe(args, *transport, scratch, pool_).ok());
      EXPECT_TRUE(stream_.synchronize().ok());
      EXPECT_TRUE(same_bits(residual.values(), c.ramp(tokens))) << "the residual";
      const std::vector<float> part = partial.values();
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
    }
    return sum;
  }

  std::vector<float> on_cpu(LayerCase& c, const std::vector<float>& x, const SharedExpertWeights* shared) {
    const MoePlan p = oracle_plan(c.problem);
    MoeWeightsView weights = c.weights;
    weights.format = fp4_format();
    auto layer = std::move(*MoeLayer::make(p, ref_dense_ops(), c.router, weights, shared, pool_));
    return c.run(*layer, DType::kBF16, x, pool_);
  }

  Stream stream_;
  ThreadPool pool_{2};
  int compute_capability_ = 0;
};

TEST_P(DeviceLayerTest, AgreesWithTheOracle) {
  for (const LayerSize size :
       {LayerSize{64, 96, 5, 2}, {160, 32, 8, 4}, {288, 160, 3, 1}, {512, 256, 32, 8}}) {
    LayerCase c(size, format(), ActivationKind::kSwigluOai);
    for (const int64_t tokens : {1, 3, 7, 33, 130}) {
      const std::vector<float> x = c.tokens(tokens);
      // With more than 20 rows per expert, the sums are those of the FP8 matrix unit.
      const bool wide = tokens * size.top_k > 20 * size.num_experts && std::string(numerics().name) == "w4a8";
      EXPECT_TRUE(within_relative_l2(on_gpu(c, x, nullptr), on_cpu(c, x, nullptr),
                                     wide ? kWideFp8 : numerics().budget))
          << size.hidden << " x " << size.intermediate << ", tokens " << tokens;
    }
  }
}

TEST_P(DeviceLayerTest, EveryActivation) {
  for (const ActivationKind kind :
       {ActivationKind::kSwigluOai, ActivationKind::kSilu, ActivationKind::kRelu2}) {
    LayerCase c({96, 64, 6, 3}, format(), kind);
    const std::vector<float> x = c.tokens(20);
    EXPECT_TRUE(within_relative_l2(on_gpu(c, x, nullptr), on_cpu(c, x, nullptr), numerics().budget));
  }
}

// Tests all tactics, not only the table's default for the number of tokens.
TEST_P(DeviceLayerTest, EveryTacticAgreesWithTheOracle) {
  for (const LayerSize size : {LayerSize{160, 96, 5, 2}, {512, 256, 32, 8}})
    for (const int64_t tokens : {1, 7, 33}) {
      LayerCase c(size, format(), ActivationKind::kSilu);
      const MoePlan p = plan(c.problem);
      if (p.scheme() == Scheme::kW4A4) GTEST_SKIP() << "w4a4 has no tactics";
      const std::vector<float> x = c.tokens(tokens), expected = on_cpu(c, x, nullptr);
      const std::span<const DeviceMoeTactic> tactics = p.device_ops().tactics;
      for (uint8_t i = 0; i < tactics.size(); ++i) {
        const DeviceMoeArgs sizes = {.experts = {format(), size.num_experts, size.hidden, size.intermediate},
                                     .num_tokens = tokens,
                                     .topk = size.top_k};
        if (!tactics[i].fits(sizes)) continue;
        const bool sums_14_bits = p.numerics().is_fp8() && std::string_view(tactics[i].name) == "wide";
        EXPECT_TRUE(within_relative_l2(on_gpu(p.with_tactics(DeviceTactics{{tokens}, {i}}), c, x, nullptr),
                                       expected, sums_14_bits ? kWideFp8 : numerics().budget))
            << tactics[i].name << ", " << size.hidden << " x " << size.intermediate << ", tokens " << tokens;
      }
    }
}

// For many tokens, the last kernel of the routed experts adds it.
TEST_P(DeviceLayerTest, ASharedExpertOfEitherPrecisionIsAdded) {
  for (const bool fp4 : {false, true})
    for (const int64_t tokens : {9, 1030})
      for (const bool has_gate : {false, true}) {
        if (tokens > 1000 && fp4 != has_gate) continue;  // slow
        LayerCase c({128, 64, 4, 2}, format(), ActivationKind::kSilu);
        const MlpCase mlp(fp4_format(), fp4, 128, 96);
        const std::vector<bf16> gate = to_bf16(c.random.normal(128, 0.3f));
        const SharedExpertWeights shared{mlp.view, has_gate ? gate.data() : nullptr};
        const std::vector<float> x = c.tokens(tokens);
        const bool sums_14_bits = tokens > 1000 && plan(c.problem).numerics().is_fp8();
        EXPECT_TRUE(within_relative_l2(on_gpu(c, x, &shared), on_cpu(c, x, &shared),
                                       sums_14_bits ? kWideFp8 : numerics().budget))
            << "FP4 " << fp4 << ", gate " << has_gate << ", tokens " << tokens;
      }
}

// Its bits do not depend on which kernel adds it: 1000 and 1024 tokens run the same other kernels.
TEST_P(DeviceLayerTest, ASharedExpertHasTheSameBitsForManyTokens) {
  for (const bool has_gate : {false, true}) {
    LayerCase c({128, 64, 4, 2}, format(), ActivationKind::kSilu);
    const MlpCase mlp(fp4_format(), /*is_fp4=*/true, 128, 96);
    const std::vector<bf16> gate = to_bf16(c.random.normal(128, 0.3f));
    const SharedExpertWeights shared{mlp.view, has_gate ? gate.data() : nullptr};
    std::vector<float> x = c.tokens(1024);
    MoePlan p = plan(c.problem);
    if (p.numerics().scheme != Scheme::kW4A4) {
      const std::span<const DeviceMoeTactic> tactics = p.device_ops().tactics;
      const auto wide = static_cast<uint8_t>(
          std::ranges::find(tactics, std::string_view("wide"), &DeviceMoeTactic::name) - tactics.begin());
      p = p.with_tactics(DeviceTactics{{1024}, {wide < tactics.size() ? wide : uint8_t{0}}});
    }
    std::vector<float> many = on_gpu(p, c, x, &shared);
    x.resize(1000 * 128);
    many.resize(x.size());
    EXPECT_TRUE(same_bits(on_gpu(p, c, x, &shared), many)) << "gate " << has_gate;
  }
}

// With one rank, a shared expert that is like the routed ones runs in their launch for up to 256 tokens, and
// one in bf16 for a few.
TEST_P(DeviceLayerTest, ASharedExpertInTheLaunchOfTheOthersIsAdded) {
  struct {
    LayerSize size;
    int64_t width;  // of the shared expert
    bool is_fp4, has_gate;
  } const cases[] = {{{512, 256, 32, 8}, 256, true, false}, {{512, 256, 32, 8}, 256, true, true},
                     {{512, 256, 32, 8}, 256, false, true}, {{160, 96, 16, 4}, 32, false, false},
                     {{96, 160, 16, 4}, 160, false, true},  {{2048, 512, 16, 8}, 512, false, true}};
  for (const auto& [size, width, is_fp4, has_gate] : cases) {
    LayerCase c(size, format(), ActivationKind::kSilu);
    const MlpCase mlp(fp4_format(), is_fp4, size.hidden, width);
    const std::vector<bf16> gate = to_bf16(c.random.normal(size.hidden, 0.3f));
    const SharedExpertWeights shared{mlp.view, has_gate ? gate.data() : nullptr};
    for (const int tokens : {0, 1, 3, 7, 8, 40, 256, 257}) {
      if (size.hidden > 1000 && tokens != 3) continue;  // slow
      if (tokens > 40 && !is_fp4) continue;
      const std::vector<float> x = c.tokens(tokens), gpu = on_gpu(c, x, &shared);
      SCOPED_TRACE(std::to_string(size.hidden) + " x " + std::to_string(width) + (is_fp4 ? " FP4" : " bf16") +
                   (has_gate ? ", gate, " : ", ") + std::to_string(tokens) + " tokens");
      const bool sums_14_bits = tokens > 40 && plan(c.problem).numerics().is_fp8();
      EXPECT_TRUE(
          within_relative_l2(gpu, on_cpu(c, x, &shared), sums_14_bits ? kWideFp8 : numerics().budget));
      EXPECT_EQ(same_bits(gpu, on_gpu(c, x, nullptr)), tokens == 0);
    }
  }
}

// The shared expert runs beside the routed experts if the stream has a side stream and it is too wide for
// their launch.
TEST_P(DeviceLayerTest, ASideStreamChangesNoBits) {
  for (const bool fp4 : {false, true})
    for (const int tokens : {0, 1, 8, 100}) {
      LayerCase c({512, 256, 32, 8}, format(), ActivationKind::kSilu);
      const MlpCase mlp(format(), fp4, 512, 640);
      const std::vector<bf16> gate = to_bf16(c.random.normal(512, 0.3f));
      const SharedExpertWeights shared{mlp.view, gate.data()};
      const std::vector<float> x = c.tokens(tokens);
      const std::vector<float> expected = on_gpu(c, x, &shared), parts = sum_of_ranks(c, x, &shared, 2, 1);
      SideStream side = std::move(*SideStream::make());
      stream_.begin_layer(7);
      stream_.set_side(&side);
      EXPECT_TRUE(same_bits(on_gpu(c, x, &shared), expected)) << "FP4 " << fp4 << ", tokens " << tokens;
      EXPECT_EQ(side.stream().layer(), tokens > 0 ? 7 : -1) << "the side stream was used, tokens " << tokens;
      EXPECT_TRUE(same_bits(sum_of_ranks(c, x, &shared, 2, 1), parts))
          << "partial, FP4 " << fp4 << ", tokens " << tokens;
      stream_.set_side(nullptr);
    }
}

TEST_P(DeviceLayerTest, NaNStaysInItsToken) {
  LayerCase c({64, 64, 4, 2}, format(), ActivationKind::kSilu);
  std::vector<float> x = c.tokens(12);
  const std::vector<float> clean = on_gpu(c, x, nullptr);
  x[5 * 64 + 3] = kNaN;
  const std::vector<float> got = on_gpu(c, x, nullptr);
  for (size_t i = 0; i < got.size(); ++i)
    if (i / 64 == 5)
      EXPECT_TRUE(std::isnan(got[i])) << i;
    else
      EXPECT_EQ(got[i], clean[i]) << i;
}

TEST_P(DeviceLayerTest, NoTokensAreLegal) {
  LayerCase c({64, 64, 4, 2}, format(), ActivationKind::kSilu);
  EXPECT_TRUE(on_gpu(c, {}, nullptr).empty());
}

// The shards of gpt-oss's sizes have 1472 and 1408, 768 and 704, or 384 and 320 columns. With silu, the
// shared expert is like the others.
TEST_P(DeviceLayerTest, TheRanksOfAGroupAddUpToTheWholeLayer) {
  for (const LayerSize size : {LayerSize{2880, 2880, 8, 2}, LayerSize{160, 256, 16, 4}})
    for (const int64_t tokens : {1, 40}) {
      LayerCase c(size, format(), size.hidden == 160 ? ActivationKind::kSilu : ActivationKind::kSwigluOai);
      const std::vector<float> x = c.tokens(tokens);
      const MlpCase mlp(fp4_format(), /*is_fp4=*/true, size.hidden, 256);
      const SharedExpertWeights shared{mlp.view, nullptr};
      std::vector<float> expected = on_gpu(c, x, &shared);
      const std::vector<float> residual = c.ramp(tokens);
      for (size_t i = 0; i < expected.size(); ++i) expected[i] -= residual[i];
      for (const int ranks : {2, 4, 8})
        for (const int ep : {1, ranks})
          EXPECT_TRUE(within_relative_l2(sum_of_ranks(c, x, &shared, ranks, ep), expected, group_budget()))
              << size.hidden << " x " << size.intermediate << ", " << tokens << " tokens, " << ranks
              << " ranks, ep " << ep;
    }
}

bool computes(const RunnerRow& row, const NamedNumerics& n) {
  const std::string_view compute = n.fp4_compute;
  return row.schemes.has(compute == "w4a4"   ? Scheme::kW4A4
                         : compute == "w4a8" ? Scheme::kW4A8
                                             : Scheme::kW4A16);
}

std::vector<std::tuple<const RunnerRow*, Fp4Format, NamedNumerics>> all_params() {
  std::vector<std::tuple<const RunnerRow*, Fp4Format, NamedNumerics>> params;
  for (const RunnerRow& row : runner_rows())
    for (const Fp4Format format : kExpertFormats)
      for (const NamedNumerics& n : kNumerics)
        if (row.device == DeviceKind::kCuda && row.formats.has(format) && computes(row, n) &&
            (format == Fp4Format::kNvfp4 || std::string(n.fp4_compute) != "w4a4"))
          params.push_back({&row, format, n});
  return params;
}

INSTANTIATE_TEST_SUITE_P(Table, DeviceLayerTest, testing::ValuesIn(all_params()), [](const auto& p) {
  return std::string(std::get<0>(p.param)->name) + "_" + fp4_format_name(std::get<1>(p.param)) + "_" +
         std::get<2>(p.param).name;
});

}  // namespace
}  // namespace fp4moe
