// Compares whole w4a8 layers on a GPU, with every tactic, with double sums over the same FP8 tokens and
// operands. Every call must give the same bits.
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "formats/e4m3.h"
#include "formats/fp8.h"
#include "kernels/cuda/layout/fp8_tile_layout.h"
#include "kernels/cuda/layout/host_tiles.h"
#include "kernels/cuda/moe_device_case.h"
#include "kernels/device_moe_fp8.h"
#include "kernels/device_peak.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

// The last slabs of gate/up and of down hold 32 and 96 columns; half of gate/up's last slab is not read.
constexpr int64_t kHidden = 160, kIntermediate = 224, kExperts = 5, kFirst = 3, kTopk = 3;

struct LayerRun {
  int64_t tokens;
  Fp4Format format;
  std::vector<int32_t> ids;  // also ids of 3 experts on either side of the local ones
  std::vector<float> weights;
  std::vector<float> x;                // bf16 values
  std::vector<uint8_t> gate_up, down;  // tiles
  std::vector<float> out;
};

int64_t gate_up_bytes(Fp4Format format) { return fp8_tiled_bytes(format, 2 * kIntermediate, kHidden); }
int64_t down_bytes(Fp4Format format) { return fp8_tiled_bytes(format, kHidden, kIntermediate); }

// Returns the result of `times` calls; all must give the same bits.
LayerRun run_layer(const DeviceMoeTactic& tactic, int64_t tokens, Fp4Format format, int64_t nan_token = -1,
                   int times = 1) {
  Random random(static_cast<uint64_t>(tokens) + 1);
  LayerRun run{.tokens = tokens, .format = format};
  for (int64_t slot = 0; slot < tokens * kTopk; ++slot) {
    run.ids.push_back(static_cast<int32_t>(random.integer(0, kFirst + kExperts + 2)));
    run.weights.push_back(0.25f + 0.25f * static_cast<float>(slot % 3));
  }
  if (tokens > 0) run.ids[0] = kFirst;  // at least one is local
  std::vector<bf16> x = to_bf16(random.normal(tokens * kHidden));
  if (nan_token >= 0) x[static_cast<size_t>(nan_token * kHidden + 7)] = float_to_bf16(NAN);
  run.x = to_float(x);

  Stream stream = Stream::make().value();
  StreamScope scope(stream);
  const DevicePeakOps& data = *sm90_peak_ops();
  DeviceArray<uint8_t> gate_up(kExperts * gate_up_bytes(format)), down(kExperts * down_bytes(format));
  data.fill_fp8_tiles({format, gate_up.data(), 2 * kIntermediate, kHidden, kExperts, 1});
  data.fill_fp8_tiles({format, down.data(), kHidden, kIntermediate, kExperts, 2});
  EXPECT_TRUE(stream.synchronize().ok());
  const DeviceArray<float> scales(std::vector<float>(kExperts * 3, 0.5f));
  const DeviceArray<bf16> device_x(x);
  const DeviceArray<int32_t> ids(run.ids);
  const DeviceArray<float> weights(run.weights);
  const DeviceArray<float> out(tokens * kHidden);
  DeviceMoeArgs args{.experts = {.format = format,
                                 .num_experts = kExperts,
                                 .hidden_size = kHidden,
                                 .intermediate_size = kIntermediate,
                                 .activation = {ActivationKind::kSilu},
                                 .gate_up = gate_up.data(),
                                 .down = down.data(),
                                 .scales = scales.data()},
                     .x = device_x.data(),
                     .ids = ids.data(),
                     .weights = weights.data(),
                     .num_tokens = tokens,
                     .topk = kTopk,
                     .first_expert = kFirst,
                     .out = out.data()};
  const DeviceArray<uint8_t> workspace(tactic.workspace_bytes(args.experts, tokens, kTopk));
  const DeviceArray<uint8_t> counters(std::vector<uint8_t>(size_t{kMoeCounterBytes}, uint8_t{0}));
  args.workspace = workspace.data();
  args.counters = counters.data();
  if (!tactic.fits(args)) return run;
  for (int i = 0; i < times; ++i) {
    tactic.layer(args);
    EXPECT_TRUE(stream.synchronize().ok());
    const std::vector<float> now = out.values();
    if (i == 0) run.out = now;
    if (!same_bits(now, run.out)) {
      ADD_FAILURE() << "call " << i + 1 << " gave different bits";
      break;
    }
  }
  run.gate_up = gate_up.values();
  run.down = down.values();
  return run;
}

// A row's values after quantisation to e4m3.
template <class T>
std::vector<double> quantised(const std::vector<T>& row) {
  std::vector<uint8_t> codes(row.size());
  const float scale = fp8_quantize_token(row.data(), static_cast<int64_t>(row.size()), codes.data());
  std::vector<double> values;
  for (const uint8_t code : codes) values.push_back(static_cast<double>(e4m3_decode(code)) * scale);
  return values;
}

// Token t's output in double.
std::vector<double> expected(const LayerRun& run, int64_t t) {
  const std::vector<double> x =
      quantised(std::vector<float>(run.x.begin() + t * kHidden, run.x.begin() + (t + 1) * kHidden));
  std::vector<double> out(kHidden, 0.0);
  for (int64_t k = 0; k < kTopk; ++k) {
    const auto slot = static_cast<size_t>(t * kTopk + k);
    const int64_t e = run.ids[slot] - kFirst;
    if (e < 0 || e >= kExperts) continue;
    const uint8_t* const gate_up = run.gate_up.data() + e * gate_up_bytes(run.format);
    const uint8_t* const down = run.down.data() + e * down_bytes(run.format);
    std::vector<bf16> rounded;
    for (int64_t i = 0; i < kIntermediate; ++i) {
      const int64_t gate_row = i / 32 * 64 + i % 32 / 8 * 16 + i % 8;
      double gate = 0, up = 0;
      for (int64_t c = 0; c < kHidden; ++c) {
        gate += x[static_cast<size_t>(c)] *
                fp8_tiled_at(run.format, gate_up, 2 * kIntermediate, kHidden, gate_row, c);
        up += x[static_cast<size_t>(c)] *
              fp8_tiled_at(run.format, gate_up, 2 * kIntermediate, kHidden, gate_row + 8, c);
      }
      gate *= 0.5, up *= 0.5;
      rounded.push_back(float_to_bf16(static_cast<float>(gate / (1 + std::exp(-gate)) * up)));
    }
    const std::vector<double> h = quantised(rounded);
    for (int64_t r = 0; r < kHidden; ++r) {
      double sum = 0;
      for (int64_t i = 0; i < kIntermediate; ++i)
        sum += h[static_cast<size_t>(i)] * fp8_tiled_at(run.format, down, kHidden, kIntermediate, r, i);
      out[static_cast<size_t>(r)] += 0.5 * sum * static_cast<double>(run.weights[slot]);
    }
  }
  return out;
}

class Fp8LayerTest : public testing::TestWithParam<std::tuple<DeviceMoeTactic, Fp4Format>> {
 protected:
  const DeviceMoeTactic& tactic() const { return std::get<0>(GetParam()); }
  Fp4Format format() const { return std::get<1>(GetParam()); }
  bool is(const char* name) const { return std::string(tactic().name) == name; }
  std::vector<int64_t> sizes() const {
    return is("few_tokens") ? std::vector<int64_t>{1, 2, 5, 8} : std::vector<int64_t>{1, 9, 40, 130};
  }
};

// Errors of the f32 sums flip some codes of the intermediate; "wide" sums with about 14 bits. Unquantised
// activations would give an error of 4e-2.
TEST_P(Fp8LayerTest, IsTheOraclesFunction) {
  for (const int64_t tokens : sizes()) {
    const LayerRun run = run_layer(tactic(), tokens, format());
    ASSERT_EQ(std::ssize(run.out), tokens * kHidden);
    double error = 0, norm = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      const std::vector<double> want = expected(run, t);
      for (int64_t r = 0; r < kHidden; ++r) {
        const double got = run.out[static_cast<size_t>(t * kHidden + r)], w = want[static_cast<size_t>(r)];
        error += (got - w) * (got - w);
        norm += w * w;
      }
    }
    EXPECT_LE(std::sqrt(error), (is("wide") ? 2e-2 : 5e-3) * std::sqrt(norm)) << "T=" << tokens;
  }
}

TEST_P(Fp8LayerTest, SameBitsOnEveryRun) {
  run_layer(tactic(), is("few_tokens") ? 8 : 1000, format(), -1, is("few_tokens") ? 300 : 1000);
}

TEST_P(Fp8LayerTest, NanStaysInItsToken) {
  const int64_t tokens = is("few_tokens") ? 7 : 9;
  const LayerRun clean = run_layer(tactic(), tokens, format()),
                 run = run_layer(tactic(), tokens, format(), 4);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t r = 0; r < kHidden; ++r) {
      const auto i = static_cast<size_t>(t * kHidden + r);
      if (t != 4) {
        EXPECT_EQ(run.out[i], clean.out[i]) << t;
      } else {
        EXPECT_TRUE(std::isnan(run.out[i])) << r;
      }
    }
  }
}

TEST_P(Fp8LayerTest, NoTokensAreLegal) { EXPECT_TRUE(run_layer(tactic(), 0, format()).out.empty()); }

INSTANTIATE_TEST_SUITE_P(
    Tactics, Fp8LayerTest,
    testing::Combine(testing::ValuesIn(std::vector<DeviceMoeTactic>(sm90_fp8_moe_ops()->tactics.begin(),
                                                                    sm90_fp8_moe_ops()->tactics.end())),
                     testing::Values(Fp4Format::kMxfp4, Fp4Format::kNvfp4)),
    [](const auto& p) {
      return std::string(std::get<0>(p.param).name) + "_" + fp4_format_name(std::get<1>(p.param));
    });

}  // namespace
}  // namespace fp4moe
