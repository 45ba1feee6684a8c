// Compares the expert GEMMs and whole layers for Hopper with double loops over the tiles.
#include "kernels/cuda/experts/sm90_expert_gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "device/stream.h"
#include "kernels/cuda/sm90_expert_gemm_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<bf16> as_bf16(const std::vector<float>& v) {
  std::vector<bf16> out;
  for (const float f : v) out.push_back(float_to_bf16(f));
  return out;
}

using Sums = std::vector<TiledExpertsCase::Sum>;

testing::AssertionResult within(const std::vector<float>& actual, const Sums& expected) {
  std::vector<float> values, budget;
  for (const auto& s : expected) {
    values.push_back(static_cast<float>(s.value));
    budget.push_back(static_cast<float>(s.magnitude + 1e-7 * std::abs(s.value)));
  }
  return within_budget(actual, values, budget);
}

class OnStream : public testing::Test {
 protected:
  void expect_done() {
    const Status status = stream_.synchronize();
    ASSERT_TRUE(status.ok()) << status.message();
  }

  Stream stream_ = std::move(*Stream::make());
  StreamScope scope_{stream_};
};

class Sm90ExpertGemm : public OnStream, public testing::WithParamInterface<Fp4Format> {
 protected:
  // Runs each GEMM separately over packed rows with the given counts (gathered x, f32 outputs, row scales),
  // with the tiles for few rows per expert and with the tiles for many.
  void expect_gemms(const ExpertShape& shape, const std::vector<int32_t>& counts) {
    expect_gemms(shape, counts, 1);
    expect_gemms(shape, counts, 1000);
  }
  void expect_gemms(const ExpertShape& shape, const std::vector<int32_t>& counts, int64_t expected_rows) {
    SCOPED_TRACE(std::string(shape.name) + ", expected rows " + std::to_string(expected_rows));
    TiledExpertsCase experts(GetParam(), shape, 7);
    const int64_t topk = 3, h = shape.hidden, i_size = shape.intermediate;
    std::vector<int32_t> offsets{0};
    for (const int32_t count : counts) offsets.push_back(offsets.back() + count);
    const int64_t num_rows = offsets.back(), num_tokens = num_rows + 5;
    std::vector<int32_t> slots;
    for (int64_t r = 0; r < num_rows; ++r)
      slots.push_back(static_cast<int32_t>(experts.rng()() % static_cast<uint64_t>(num_tokens * topk)));
    const std::vector<float> x = experts.random_bf16_values(num_tokens * h);
    const std::vector<float> act = experts.random_bf16_values(num_rows * i_size);
    std::vector<float> x_scales = experts.random_floats(num_tokens);
    const DeviceArray<int32_t> device_counts(counts), device_offsets(offsets), device_slots(slots);
    const DeviceArray<bf16> device_x(as_bf16(x)), device_act(as_bf16(act));
    const DeviceArray<float> device_x_scales(x_scales), out(poisoned<float>(num_rows * i_size));
    const DeviceArray<float> y(poisoned<float>(num_rows * h));
    const DeviceArray<bf16> y_bf16(poisoned<bf16>(num_rows * h));

    DeviceExpertArgs args;
    args.experts = experts.on_device();
    args.rows = {.max_rows = num_rows,
                 .offsets = device_offsets.data(),
                 .counts = device_counts.data(),
                 .slot_of_row = device_slots.data()};
    args.num_tokens = num_tokens;
    args.topk = topk;
    args.expected_rows = expected_rows;
    args.x = {device_x.data(), DType::kBF16, num_tokens, h};
    args.x_row_scales = device_x_scales.data();
    args.intermediate = {out.data(), DType::kF32, num_rows, i_size};
    args.h = {device_act.data(), DType::kBF16, num_rows, i_size};
    args.y = y.data();
    sm90_gate_up(args);
    sm90_down(args);
    args.y_bf16 = y_bf16.data();
    sm90_down(args);
    expect_done();

    Sums expected_out, expected_y;
    for (size_t e = 0; e < counts.size(); ++e)
      for (int32_t r = offsets[e]; r < offsets[e + 1]; ++r) {
        const int64_t token = slots[static_cast<size_t>(r)] / topk;
        experts.gate_up(static_cast<int64_t>(e), &x[static_cast<size_t>(token * h)],
                        x_scales[static_cast<size_t>(token)], &expected_out);
        experts.down(static_cast<int64_t>(e), &act[static_cast<size_t>(r * i_size)], &expected_y);
      }
    EXPECT_TRUE(within(out.values(), expected_out)) << "gate_up";
    const std::vector<float> y_values = y.values();
    EXPECT_TRUE(within(y_values, expected_y)) << "down";
    EXPECT_EQ(as_bf16(y_values), y_bf16.values()) << "down, rounded";
  }
};

TEST_P(Sm90ExpertGemm, EveryTermOfBothGemms) {
  expect_gemms({"one tile", 2, 64, 64}, {1, 8});
  expect_gemms({"half tiles", 3, 96, 32}, {7, 0, 9});
  expect_gemms({"odd tiles, silu", 4, 160, 224, ActivationKind::kSilu, false}, {0, 31, 33, 1});
  expect_gemms({"relu2", 3, 352, 96, ActivationKind::kRelu2}, {17, 3, 65});
  expect_gemms({"relu2 without bias", 2, 64, 160, ActivationKind::kRelu2, false}, {5, 12});
  expect_gemms({"several slabs", 2, 544, 288}, {40, 56});
}

// About 240 and 500 slabs in the second GEMM: the first are whole, the next halved, the last quartered, and
// how many depends on the length of the list. An expert's second slab has one tile (few rows), so three of
// its quarters are empty.
TEST_P(Sm90ExpertGemm, ListsEndWithPartsOfSlabs) {
  for (const int64_t num_experts : {120, 250}) {
    std::vector<int32_t> counts(static_cast<size_t>(num_experts), 1);
    counts[0] = 12, counts[60] = 0, counts.rbegin()[0] = 20, counts.rbegin()[1] = 34;
    expect_gemms({std::to_string(num_experts) + " experts", num_experts, 544, 32}, counts);
  }
}

TEST_P(Sm90ExpertGemm, EveryCountOfRows) {
  for (const int32_t count : {8, 9, 16, 24, 25, 32, 33, 48, 64, 72, 80, 95, 96, 97, 112, 128, 193, 257, 300})
    expect_gemms({std::to_string(count) + " rows", 2, 96, 64}, {count, 1});
}

TEST_P(Sm90ExpertGemm, IdleExperts) {
  expect_gemms({"all idle but the last", 70, 64, 32}, [] {
    std::vector<int32_t> counts(70);
    counts.back() = 3;
    return counts;
  }());
  expect_gemms({"no rows at all", 4, 64, 32}, {0, 0, 0, 0});
}

// Masked layout: rows past an expert's count hold NaN, and their outputs are not written; counts above the
// capacity are clamped. expected_rows selects a kernel but changes no bits, even if it is 0, wrong or huge.
TEST_P(Sm90ExpertGemm, MaskedRowsWhateverIsExpected) {
  const ExpertShape shape{"masked", 4, 1440, 96};
  TiledExpertsCase experts(GetParam(), shape, 8);
  const int64_t capacity = 40, num_rows = 4 * capacity, hidden = shape.hidden;
  const std::vector<int32_t> masked_m{3, 0, 1000, 33}, used{3, 0, 40, 33};
  const auto is_used = [&](int64_t r) { return r % capacity < used[static_cast<size_t>(r / capacity)]; };
  std::vector<float> x = experts.random_bf16_values(num_rows * hidden);
  for (int64_t r = 0; r < num_rows; ++r)
    if (!is_used(r)) std::fill_n(x.begin() + r * hidden, hidden, kNaN);
  const DeviceArray<int32_t> counts(masked_m);
  const DeviceArray<bf16> device_x(as_bf16(x));
  struct Outputs {
    std::vector<bf16> h;
    std::vector<float> y;
  };
  const auto run = [&](int64_t expected_rows) -> Outputs {
    const DeviceArray<bf16> intermediate(poisoned<bf16>(num_rows * 96));
    const DeviceArray<float> y(poisoned<float>(num_rows * hidden));
    DeviceExpertArgs args;
    args.experts = experts.on_device();
    args.rows = {.max_rows = num_rows, .capacity = capacity, .counts = counts.data()};
    args.expected_rows = expected_rows;
    args.x = {device_x.data(), DType::kBF16, num_rows, hidden};
    args.gather = false;
    args.intermediate = args.h = {intermediate.data(), DType::kBF16, num_rows, 96};
    args.y = y.data();
    sm90_gate_up(args);
    sm90_down(args);
    expect_done();
    return {intermediate.values(), y.values()};
  };
  const Outputs got = run(0);
  for (const int64_t expected_rows : {int64_t{1}, int64_t{19}, int64_t{1} << 40}) {
    const Outputs other = run(expected_rows);
    EXPECT_EQ(got.h, other.h) << "expected rows " << expected_rows;
    EXPECT_TRUE(same_bits(got.y, other.y)) << "expected rows " << expected_rows;
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t e = r / capacity;
    const std::vector<float> row(got.y.begin() + r * hidden, got.y.begin() + (r + 1) * hidden);
    if (!is_used(r)) {
      EXPECT_TRUE(std::all_of(row.begin(), row.end(), [](float v) { return std::isnan(v); })) << r;
      continue;
    }
    std::vector<float> h;
    for (int64_t i = 0; i < 96; ++i) h.push_back(bf16_to_float(got.h[static_cast<size_t>(r * 96 + i)]));
    Sums expected_h, expected_y;
    experts.gate_up(e, &x[static_cast<size_t>(r * hidden)], 1, &expected_h);
    for (auto& s : expected_h) s.magnitude += 0x1p-8 * std::abs(s.value);
    EXPECT_TRUE(within(h, expected_h)) << r;
    experts.down(e, h.data(), &expected_y);
    EXPECT_TRUE(within(row, expected_y)) << r;
  }
}

// The routing of a whole layer's batch.
struct Batch {
  std::string name;
  int64_t num_tokens = 1, topk = 2, first_expert = 0;
  std::vector<int32_t> ids;
};

class Sm90Layer : public OnStream,
                  public testing::WithParamInterface<std::tuple<Fp4Format, DeviceMoeTactic>> {
 protected:
  const Fp4Format format_ = std::get<0>(GetParam());
  const DeviceMoeTactic& tactic_ = std::get<1>(GetParam());

  Batch uniform(int64_t num_tokens, int64_t topk, int64_t num_experts, uint32_t seed) {
    std::mt19937 rng(seed);
    Batch batch{std::to_string(num_tokens) + " tokens", num_tokens, topk, 0, {}};
    for (int64_t i = 0; i < num_tokens * topk; ++i)
      batch.ids.push_back(static_cast<int32_t>(rng() % static_cast<uint32_t>(num_experts)));
    return batch;
  }

  bool fits(const ExpertShape& shape, const Batch& batch) const {
    DeviceMoeArgs sizes;
    sizes.experts = {.format = format_,
                     .num_experts = shape.num_experts,
                     .hidden_size = shape.hidden,
                     .intermediate_size = shape.intermediate,
                     .activation = {.kind = shape.kind}};
    sizes.num_tokens = batch.num_tokens;
    sizes.topk = batch.topk;
    return tactic_.fits(sizes);
  }

  // Returns the output; checks that `repeats` more calls on the used workspace give the same bits.
  std::vector<float> run(const TiledExpertsCase& experts, const Batch& batch, const std::vector<float>& x,
                         const std::vector<float>& weights, int repeats = 1) {
    const TiledExperts tiled = experts.on_device();
    const DeviceArray<int32_t> ids(batch.ids);
    const DeviceArray<float> device_weights(weights);
    const DeviceArray<float> out(poisoned<float>(batch.num_tokens * tiled.hidden_size));
    const DeviceArray<bf16> device_x(as_bf16(x));
    const DeviceArray<uint8_t> counters(std::vector<uint8_t>(kMoeCounterBytes, 0));
    const DeviceArray<uint8_t> workspace(
        poisoned<uint8_t>(tactic_.workspace_bytes(tiled, batch.num_tokens, batch.topk)));
    DeviceMoeArgs args;
    args.experts = tiled;
    args.x = device_x.data();
    args.ids = ids.data();
    args.weights = device_weights.data();
    args.num_tokens = batch.num_tokens;
    args.topk = batch.topk;
    args.first_expert = batch.first_expert;
    args.out = out.data();
    args.counters = counters.data();
    args.workspace = workspace.data();
    tactic_.layer(args);
    expect_done();
    const std::vector<float> first = out.values();
    for (int i = 0; i < repeats; ++i) {
      tactic_.layer(args);
      expect_done();
      const std::vector<float> again = out.values();
      if (!same_bits(first, again)) {
        ADD_FAILURE() << "call " << i + 2 << " gave different bits";
        break;
      }
    }
    return first;
  }

  std::vector<float> expected(const TiledExpertsCase& experts, const ExpertShape& shape, const Batch& batch,
                              const std::vector<float>& x, const std::vector<float>& weights) {
    std::vector<float> out(static_cast<size_t>(batch.num_tokens * shape.hidden));
    for (int64_t slot = 0; slot < std::ssize(batch.ids); ++slot) {
      const int64_t e = batch.ids[static_cast<size_t>(slot)] - batch.first_expert, t = slot / batch.topk;
      if (e < 0 || e >= shape.num_experts) continue;
      Sums h, y;
      experts.gate_up(e, &x[static_cast<size_t>(t * shape.hidden)], 1, &h);
      std::vector<float> row;
      for (const auto& s : h)
        row.push_back(round_to_bf16(static_cast<float>(s.value)));  // h is stored as bf16
      experts.down(e, row.data(), &y);
      for (int64_t c = 0; c < shape.hidden; ++c)
        out[static_cast<size_t>(t * shape.hidden + c)] +=
            weights[static_cast<size_t>(slot)] * static_cast<float>(y[static_cast<size_t>(c)].value);
    }
    return out;
  }

  // Returns the first of max_tokens, max_tokens / 2, max_tokens / 4, ... that fits with 4 experts per token.
  int64_t most_tokens(const ExpertShape& shape, int64_t max_tokens) const {
    while (max_tokens > 4 && !fits(shape, {"", max_tokens, 4, 0, {}})) max_tokens /= 2;
    return max_tokens;
  }

  void expect_layer(const ExpertShape& shape, const Batch& batch) {
    SCOPED_TRACE(shape.name + ", " + batch.name);
    if (!fits(shape, batch)) return;
    TiledExpertsCase experts(format_, shape, 9);
    const std::vector<float> x = experts.random_bf16_values(batch.num_tokens * shape.hidden);
    const std::vector<float> weights = experts.random_floats(std::ssize(batch.ids));
    EXPECT_TRUE(within_relative_l2(run(experts, batch, x, weights),
                                   expected(experts, shape, batch, x, weights), 3e-3));
  }
};

TEST_P(Sm90Layer, EveryNumberOfTokens) {
  for (const int64_t num_tokens : {0, 1, 3, 7, 8, 9, 31, 33, 127, 129, 300})
    expect_layer({"8 experts", 8, 96, 64}, uniform(num_tokens, 2, 8, 1));
}

TEST_P(Sm90Layer, Shapes) {
  expect_layer({"silu", 8, 288, 160, ActivationKind::kSilu, false}, uniform(33, 3, 8, 2));
  expect_layer({"relu2", 5, 160, 352, ActivationKind::kRelu2}, uniform(20, 2, 5, 3));
  expect_layer({"many experts, brief slabs in the second GEMM", 130, 64, 32}, uniform(90, 4, 130, 4));
  expect_layer({"many experts, equal slabs in both", 130, 96, 96}, uniform(90, 4, 130, 5));
  expect_layer({"many slabs", 250, 544, 32}, uniform(150, 3, 250, 8));
}

TEST_P(Sm90Layer, Routing) {
  const ExpertShape shape{"4 of 12 experts", 4, 128, 96};
  Batch batch = uniform(50, 3, 14, 5);
  batch.name = "foreign ids";
  batch.first_expert = 5;
  batch.ids[0] = -1, batch.ids[1] = INT32_MAX, batch.ids[2] = INT32_MIN;
  expect_layer(shape, batch);
  batch = {"duplicates", 9, 2, 0, std::vector<int32_t>(18, 3)};
  expect_layer(shape, batch);
  batch = {"one-hot", 290, 1, 0, std::vector<int32_t>(290, 2)};
  expect_layer(shape, batch);
  batch = {"none local", 6, 2, 100, std::vector<int32_t>(12, 3)};
  expect_layer(shape, batch);
}

TEST_P(Sm90Layer, NanStaysInItsToken) {
  const ExpertShape shape{"nan", 4, 128, 96};
  TiledExpertsCase experts(format_, shape, 10);
  const int64_t num_tokens = most_tokens(shape, 60);
  const Batch batch = uniform(num_tokens, 2, 4, 6);
  std::vector<float> x = experts.random_bf16_values(num_tokens * 128);
  const std::vector<float> weights = experts.random_floats(num_tokens * 2);
  const std::vector<float> clean = run(experts, batch, x, weights);
  x[3 * 128 + 5] = kNaN;
  const std::vector<float> got = run(experts, batch, x, weights);
  for (size_t i = 0; i < got.size(); ++i) {
    if (i / 128 == 3)
      EXPECT_TRUE(std::isnan(got[i])) << i;
    else
      ASSERT_EQ(got[i], clean[i]) << i;
  }
}

TEST_P(Sm90Layer, SameBitsEveryTime) {
  const ExpertShape shape{"repeated", 16, 128, 64};
  TiledExpertsCase experts(format_, shape, 11);
  const int64_t num_tokens = most_tokens(shape, 8192);
  const Batch batch = uniform(num_tokens, 4, 16, 7);
  run(experts, batch, experts.random_bf16_values(num_tokens * 128), experts.random_floats(num_tokens * 4),
      1000);
}

const auto kFormats = testing::Values(Fp4Format::kMxfp4, Fp4Format::kNvfp4);
const auto kName = [](const auto& p) { return std::string(fp4_format_name(p.param)); };
INSTANTIATE_TEST_SUITE_P(Formats, Sm90ExpertGemm, kFormats, kName);
INSTANTIATE_TEST_SUITE_P(
    Tactics, Sm90Layer,
    testing::Combine(kFormats,
                     testing::ValuesIn(std::vector<DeviceMoeTactic>(sm90_moe_ops()->tactics.begin(),
                                                                    sm90_moe_ops()->tactics.end()))),
    [](const auto& p) {
      return std::string(fp4_format_name(std::get<0>(p.param))) + "_" + std::get<1>(p.param).name;
    });

}  // namespace
}  // namespace fp4moe
