// Compares the fallback expert GEMMs, which run on any GPU, with double sums computed directly from the
// checkpoint's codes. Rows without an expert keep their initial NaN.
#include "kernels/cuda/experts/fallback_expert_gemm.h"

#include <algorithm>
#include <cmath>
#include <ostream>

#include "kernels/act_quant.h"
#include "kernels/cuda/layout/host_tiles.h"
#include "kernels/cuda/layout/tile_layout.h"
#include "kernels/cuda/moe_device_case.h"
#include "kernels/expert_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

struct Case {
  Fp4Format format;
  ActivationKind activation;
  int64_t tokens, topk, experts, hidden, intermediate;
  Spread spread = Spread::kEven;
  bool gather = true;
  DType intermediate_dtype = DType::kBF16;
  bool row_scales = false;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << fp4_format_name(c.format) << " activation " << static_cast<int>(c.activation) << " T "
             << c.tokens << " topk " << c.topk << " L " << c.experts << " H " << c.hidden << " I "
             << c.intermediate << " spread " << static_cast<int>(c.spread) << " gather " << c.gather << " "
             << dtype_name(c.intermediate_dtype) << " row scales " << c.row_scales;
}

struct Expert {
  Fp4Matrix gate, up, down;
};

// The weights of a case in tiles, on the device.
struct Weights {
  Weights(const Case& c, Random& random) {
    const bool gated = is_gated(c.activation);
    const int64_t n = (gated ? 2 : 1) * c.intermediate;
    const int64_t gate_up_bytes = tiled_bytes(c.format, n, c.hidden);
    const int64_t down_bytes = tiled_bytes(c.format, c.hidden, c.intermediate);
    std::vector<uint8_t> gate_up_tiles(static_cast<size_t>(gate_up_bytes * c.experts));
    std::vector<uint8_t> down_tiles(static_cast<size_t>(down_bytes * c.experts));
    std::vector<float> factors;
    for (int64_t e = 0; e < c.experts; ++e) {
      experts.push_back({Fp4Matrix(c.format, c.intermediate, c.hidden, random),
                         Fp4Matrix(c.format, c.intermediate, c.hidden, random),
                         Fp4Matrix(c.format, c.hidden, c.intermediate, random)});
      const Expert& w = experts.back();
      uint8_t* dst = gate_up_tiles.data() + gate_up_bytes * e;
      GateUpFactors f;
      if (gated)
        f = *pack_gate_up_tiles(w.gate.view(), w.up.view(), dst);
      else
        f.up = *pack_tiles(w.up.view(), dst);
      const float down_factor = *pack_tiles(w.down.view(), down_tiles.data() + down_bytes * e);
      factors.insert(factors.end(), {f.gate * w.gate.view().tensor_scale, f.up * w.up.view().tensor_scale,
                                     down_factor * w.down.view().tensor_scale});
    }
    bias1 = random.normal(c.experts * n, 0.2f), bias2 = random.normal(c.experts * c.hidden, 0.2f);
    gate_up.emplace(gate_up_tiles), down.emplace(down_tiles), scales.emplace(factors);
    device_bias1.emplace(bias1), device_bias2.emplace(bias2);
  }
  std::vector<Expert> experts;
  std::vector<float> bias1, bias2;
  std::optional<DeviceArray<uint8_t>> gate_up, down;
  std::optional<DeviceArray<float>> scales, device_bias1, device_bias2;
};

class FallbackExpertGemm : public testing::TestWithParam<Case> {
 protected:
  FallbackExpertGemm()
      : stream_(*Stream::make()),
        scope_(stream_),
        c_(GetParam()),
        random_(17),
        weights_(c_, random_),
        sorted_(c_.tokens, c_.topk, c_.experts, c_.spread, random_),
        x_(to_bf16(random_.normal((c_.gather ? c_.tokens : sorted_.max_rows()) * c_.hidden))),
        x_scales_(random_.normal(static_cast<int64_t>(x_.size()) / c_.hidden)) {}

  DeviceExpertArgs args() const {
    DeviceExpertArgs a;
    a.experts = {c_.format, c_.experts, c_.hidden, c_.intermediate, activation()};
    a.experts.gate_up = weights_.gate_up->data(), a.experts.down = weights_.down->data();
    a.experts.gate_up_bias = weights_.device_bias1->data();
    a.experts.down_bias = weights_.device_bias2->data();
    a.experts.scales = weights_.scales->data();
    a.rows = sorted_.device_rows();
    a.num_tokens = c_.tokens, a.topk = c_.topk;
    a.gather = c_.gather;
    return a;
  }
  Activation activation() const { return {c_.activation, 1.702f, 1.0f, 2.0f}; }
  int64_t source(int64_t row) const {
    return c_.gather ? sorted_.slot_of_row[static_cast<size_t>(row)] / c_.topk : row;
  }
  // Returns the intermediate of a row from sums in double.
  std::vector<float> expected_intermediate(int64_t row) const {
    const int64_t e = sorted_.expert_of(row), n = static_cast<int64_t>(weights_.bias1.size()) / c_.experts;
    const Expert& w = weights_.experts[static_cast<size_t>(e)];
    const bool gated = is_gated(c_.activation);
    const double scale = c_.row_scales ? x_scales_[static_cast<size_t>(source(row))] : 1;
    std::vector<float> x;
    for (int64_t k = 0; k < c_.hidden; ++k)
      x.push_back(bf16_to_float(x_[static_cast<size_t>(source(row) * c_.hidden + k)]));
    std::vector<float> out;
    for (int64_t i = 0; i < c_.intermediate; ++i) {
      const float* bias = weights_.bias1.data() + e * n + i;
      const double gate = gated ? exact_dot(w.gate.view(), i, x.data()).sum * scale + bias[0] : 0;
      const double up = exact_dot(w.up.view(), i, x.data()).sum * scale + bias[gated ? c_.intermediate : 0];
      out.push_back(static_cast<float>(exact_activation(activation(), gate, up)));
    }
    return out;
  }
  std::vector<float> expected_y(int64_t row, const float* h) const {
    const int64_t e = sorted_.expert_of(row);
    std::vector<float> out;
    for (int64_t i = 0; i < c_.hidden; ++i)
      out.push_back(
          static_cast<float>(exact_dot(weights_.experts[static_cast<size_t>(e)].down.view(), i, h).sum +
                             weights_.bias2[static_cast<size_t>(e * c_.hidden + i)]));
    return out;
  }

  struct Outputs {
    std::vector<float> h, y;  // for all rows; y is computed only if h is bf16
  };
  Outputs run(const DeviceRows& rows, bool gather, const std::vector<bf16>& x,
              const std::vector<float>& x_scales) {
    const DeviceArray<bf16> device_x(x), h(rows.max_rows * c_.intermediate);
    const DeviceArray<float> scales(x_scales), h_f32(rows.max_rows * c_.intermediate),
        y(rows.max_rows * c_.hidden);
    DeviceExpertArgs a = args();
    a.rows = rows;
    a.gather = gather;
    a.x = {device_x.data(), DType::kBF16, static_cast<int64_t>(x.size()) / c_.hidden, c_.hidden};
    if (c_.row_scales) a.x_row_scales = scales.data();
    const bool f32 = c_.intermediate_dtype == DType::kF32;
    a.h = {h.data(), DType::kBF16, rows.max_rows, c_.intermediate};
    a.intermediate = f32 ? ActRows{h_f32.data(), DType::kF32, rows.max_rows, c_.intermediate} : a.h;
    a.y = y.data();
    fallback_gate_up(a);
    if (!f32) fallback_down(a);
    const Status status = stream_.synchronize();
    EXPECT_TRUE(status.ok()) << status.message();
    return {f32 ? h_f32.values() : to_float(h.values()), f32 ? std::vector<float>() : y.values()};
  }

  Stream stream_;
  StreamScope scope_;
  Case c_;
  Random random_;
  Weights weights_;
  SortedRows sorted_;
  std::vector<bf16> x_;
  std::vector<float> x_scales_;
};

TEST_P(FallbackExpertGemm, IsWithinItsBudget) {
  const int64_t live = sorted_.offsets.back();
  const bool f32 = c_.intermediate_dtype == DType::kF32;
  const auto [actual_h, actual_y] = run(sorted_.device_rows(), c_.gather, x_, x_scales_);
  std::vector<float> h_actual, h_expected, y_actual, y_expected;
  const int64_t step = std::max<int64_t>(1, live / 12);
  for (int64_t row = 0; row < live; row += step) {
    const std::vector<float> expected = expected_intermediate(row);
    h_expected.insert(h_expected.end(), expected.begin(), expected.end());
    const float* h_row = actual_h.data() + row * c_.intermediate;
    h_actual.insert(h_actual.end(), h_row, h_row + c_.intermediate);
    if (f32) continue;
    const std::vector<float> y_row = expected_y(row, h_row);
    y_expected.insert(y_expected.end(), y_row.begin(), y_row.end());
    y_actual.insert(y_actual.end(), actual_y.begin() + row * c_.hidden,
                    actual_y.begin() + (row + 1) * c_.hidden);
  }
  EXPECT_TRUE(within_relative_l2(h_actual, h_expected, f32 ? 1e-5 : kBf16Eps / 2));
  if (!f32) {
    EXPECT_TRUE(within_relative_l2(y_actual, y_expected, 1e-5));
  }
  for (size_t i = 0; i < actual_h.size(); ++i)
    ASSERT_EQ(std::isnan(actual_h[i]), static_cast<int64_t>(i) >= live * c_.intermediate) << i;
}

// w4a4: compares the GPU's quantised intermediate with that of the exact sums. A code differs where the error
// of a sum crosses the midpoint between two codes.
TEST_P(FallbackExpertGemm, FewCodesOfAnF32IntermediateFlip) {
  if (c_.intermediate_dtype != DType::kF32) return;
  const int64_t live = sorted_.offsets.back();
  std::vector<float> actual = run(sorted_.device_rows(), c_.gather, x_, x_scales_).h, expected;
  actual.resize(static_cast<size_t>(live * c_.intermediate));
  for (int64_t row = 0; row < live; ++row) {
    const std::vector<float> h = expected_intermediate(row);
    expected.insert(expected.end(), h.begin(), h.end());
  }
  const auto codes = [&](std::vector<float>& h) {
    std::vector<bf16> out(h.size());
    quantize_act({.x = {h.data(), DType::kF32, live, c_.intermediate},
                  .scale = {64},
                  .out = {out.data(), DType::kBF16, live, c_.intermediate}});
    return out;
  };
  const std::vector<bf16> of_actual = codes(actual), of_expected = codes(expected);
  size_t flips = 0;
  for (size_t i = 0; i < of_actual.size(); ++i) flips += of_actual[i] != of_expected[i];
  RecordProperty("flipped_codes", static_cast<int>(flips));
  EXPECT_LE(flips, of_actual.size() / 1000) << "of " << of_actual.size();
}

TEST_P(FallbackExpertGemm, SameBitsAgain) {
  const Outputs first = run(sorted_.device_rows(), c_.gather, x_, x_scales_);
  for (int i = 0; i < 20; ++i) {
    const Outputs again = run(sorted_.device_rows(), c_.gather, x_, x_scales_);
    ASSERT_TRUE(same_bits(again.h, first.h) && same_bits(again.y, first.y)) << i;
  }
}

// The masked layout gives the same bits as the packed layout. Rows past an expert's count hold NaN, and their
// outputs are not written; a count above the capacity is clamped.
TEST_P(FallbackExpertGemm, MaskedRowsGiveThePackedOnesBits) {
  const Outputs packed = run(sorted_.device_rows(), c_.gather, x_, x_scales_);
  std::vector<int32_t> counts = sorted_.counts;
  const int64_t capacity = *std::max_element(counts.begin(), counts.end());
  const auto rows = static_cast<size_t>(c_.experts * capacity);
  std::vector<bf16> x(rows * static_cast<size_t>(c_.hidden), float_to_bf16(NAN));
  std::vector<float> scales(rows, NAN);
  std::vector<int64_t> packed_row(rows, -1);
  for (int64_t e = 0; e < c_.experts; ++e)
    for (int64_t i = 0; i < counts[static_cast<size_t>(e)]; ++i) {
      const int64_t from = sorted_.offsets[static_cast<size_t>(e)] + i, to = e * capacity + i;
      packed_row[static_cast<size_t>(to)] = from;
      scales[static_cast<size_t>(to)] = x_scales_[static_cast<size_t>(source(from))];
      std::copy_n(x_.begin() + source(from) * c_.hidden, c_.hidden, x.begin() + to * c_.hidden);
    }
  for (int32_t& count : counts)
    if (count == capacity) count += 9;
  const DeviceArray<int32_t> device_counts(counts);
  const Outputs masked =
      run({.max_rows = c_.experts * capacity, .capacity = capacity, .counts = device_counts.data()}, false, x,
          scales);
  const auto check = [&](const std::vector<float>& actual, const std::vector<float>& expected, int64_t cols) {
    for (size_t i = 0; i < actual.size(); ++i) {
      const int64_t row = packed_row[i / static_cast<size_t>(cols)];
      if (row < 0) {
        ASSERT_TRUE(std::isnan(actual[i])) << i;
      } else {
        ASSERT_EQ(actual[i], expected[static_cast<size_t>(row * cols) + i % static_cast<size_t>(cols)]) << i;
      }
    }
  };
  check(masked.h, packed.h, c_.intermediate);
  check(masked.y, packed.y, c_.hidden);
}

constexpr auto kMx = Fp4Format::kMxfp4, kNv = Fp4Format::kNvfp4;
constexpr auto kOai = ActivationKind::kSwigluOai, kSilu = ActivationKind::kSilu,
               kRelu2 = ActivationKind::kRelu2;
INSTANTIATE_TEST_SUITE_P(
    Cases, FallbackExpertGemm,
    testing::Values(Case{kMx, kSilu, 1, 1, 1, 32, 32}, Case{kMx, kOai, 37, 2, 5, 160, 96},
                    Case{kMx, kOai, 300, 1, 2, 288, 64, Spread::kOneExpert},
                    Case{kMx, kRelu2, 20, 3, 4, 96, 160, Spread::kSkewed},
                    Case{kMx, kSilu, 20, 3, 4, 96, 160, Spread::kIdleExperts, false},
                    Case{kMx, kSilu, 20, 3, 4, 96, 160, Spread::kEven, true, DType::kF32, true},
                    Case{kNv, kOai, 37, 2, 5, 160, 96},
                    Case{kNv, kOai, 120, 2, 4, 288, 160, Spread::kEven, true, DType::kF32},
                    Case{kNv, kRelu2, 20, 3, 4, 96, 160, Spread::kSkewed},
                    Case{kNv, kSilu, 300, 1, 2, 288, 64, Spread::kOneExpert, false, DType::kBF16, true}));

TEST(FallbackExpertGemmNoTokens, IsLegal) {
  Stream stream = *Stream::make();
  const StreamScope scope(stream);
  fallback_gate_up({});
  fallback_down({});
  EXPECT_TRUE(stream.synchronize().ok());
}

}  // namespace
}  // namespace fp4moe
