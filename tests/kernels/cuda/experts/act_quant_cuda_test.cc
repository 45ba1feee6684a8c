// Compares the GPU's quantisers with the CPU's, bit for bit, on all kinds of numbers: NVFP4 with
// kernels/act_quant.h, FP8 with formats/e4m3.h. Rows without an expert keep their initial NaN.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <tuple>

#include "formats/e4m3.h"
#include "kernels/act_quant.h"
#include "kernels/cuda/layout/fp8_tile_layout.h"
#include "kernels/cuda/moe_device_case.h"
#include "kernels/device_act_quant.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Returns rows with random bits (including NaN and infinities), blocks with similar exponents and ties,
// zeros, and tiny and huge numbers.
std::vector<float> rows_of_every_kind(int64_t rows, int64_t cols, uint64_t seed) {
  Random random(seed);
  std::vector<float> x;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0, exponent = 0, kind = 0; c < cols; ++c) {
      if (c % 16 == 0) kind = random.integer(0, 3), exponent = random.integer(100, 140);
      auto bits = static_cast<uint32_t>(random.integer(0, 0xffffffff));
      if (r % 8 != 0)  // here, all rows except every eighth are finite
        bits = (bits & 0x807fffffu) | static_cast<uint32_t>(exponent + random.integer(0, 4)) << 23;
      if (kind == 1) bits &= 0xfff00000u;
      if (kind == 2 && r % 3 == 0) bits &= 0x80000000u;
      if (r % 8 == 1) bits &= 0x80000000u;
      if (r % 8 == 2) bits &= 0x80ffffffu;
      if (r % 8 == 3) bits |= 0x7e000000u, bits &= 0xfeffffffu;
      x.push_back(std::bit_cast<float>(bits));
    }
  if (rows > 5) {
    x[static_cast<size_t>(4 * cols + 1)] = NAN;
    x[static_cast<size_t>(5 * cols + 3)] = -kInf;
  }
  return x;
}

// x on the device, as f32 or bf16.
struct DeviceRowsOf {
  DeviceRowsOf(DType dtype, int64_t rows, int64_t cols, const std::vector<float>& values)
      : f32(dtype == DType::kF32 ? values : std::vector<float>()),
        b16(dtype == DType::kF32 ? std::vector<bf16>() : to_bf16(values)),
        host(dtype == DType::kF32 ? values : to_float(to_bf16(values))) {
    void* data = dtype == DType::kF32 ? static_cast<void*>(f32.data()) : static_cast<void*>(b16.data());
    view = {data, dtype, rows, cols};
  }
  DeviceArray<float> f32;
  DeviceArray<bf16> b16;
  std::vector<float> host;  // the values after rounding
  ActRows view;
};

class CudaActQuant : public testing::TestWithParam<DType> {
 protected:
  CudaActQuant() : stream_(*Stream::make()), scope_(stream_) {}
  void run(const DeviceActQuantArgs& args) {
    cuda_quantize_act(args);
    const Status status = stream_.synchronize();
    ASSERT_TRUE(status.ok()) << status.message();
  }
  Stream stream_;
  StreamScope scope_;
};

// The CPU's result for the same values.
std::vector<bf16> nvfp4_rows(ActQuantKind kind, std::vector<float> x, int64_t cols, EncodeScale scale,
                             std::vector<float>& row_scales) {
  const int64_t rows = static_cast<int64_t>(x.size()) / cols;
  std::vector<bf16> out(x.size());
  row_scales.assign(static_cast<size_t>(rows), 0);
  quantize_act({.kind = kind,
                .x = {x.data(), DType::kF32, rows, cols},
                .scale = scale,
                .out = {out.data(), DType::kBF16, rows, cols},
                .row_scales = row_scales.data()});
  return out;
}

template <class T>
std::span<const uint8_t> bytes_of(const T* p, int64_t n) {
  return {reinterpret_cast<const uint8_t*>(p), static_cast<size_t>(n) * sizeof(T)};
}

TEST_P(CudaActQuant, Nvfp4IsTheCpusBitForBit) {
  for (const int64_t cols : {16, 48, 768, 2880})
    for (const float gs : {1.0f, 448.0f, 2688.0f / 3.1f, 1e-3f, 1e30f}) {
      const int64_t rows = 40;
      const DeviceRowsOf x(GetParam(), rows, cols, rows_of_every_kind(rows, cols, 3));
      for (const bool per_token : {false, true}) {
        const DeviceArray<bf16> out(rows * cols);
        const DeviceArray<float> scales(std::vector<float>{gs}), row_scales(rows);
        DeviceActQuantArgs args;
        args.kind = per_token ? DeviceActQuantKind::kNvfp4PerToken : DeviceActQuantKind::kNvfp4Static;
        args.x = x.view;
        args.scales = scales.data();
        args.out = {out.data(), DType::kBF16, rows, cols};
        args.row_scales = row_scales.data();
        run(args);
        std::vector<float> expected_scales;
        const std::vector<bf16> expected =
            nvfp4_rows(per_token ? ActQuantKind::kNvfp4PerToken : ActQuantKind::kNvfp4Static, x.host, cols,
                       {gs}, expected_scales);
        const std::vector<bf16> actual = out.values();
        ASSERT_TRUE(same_bytes(bytes_of(actual.data(), rows * cols), bytes_of(expected.data(), rows * cols)))
            << "K=" << cols << " gs=" << gs << " per token " << per_token;
        if (per_token) {
          ASSERT_TRUE(same_bits(row_scales.values(), expected_scales)) << "K=" << cols;
        }
      }
    }
}

TEST_P(CudaActQuant, Nvfp4TakesEachExpertsScaleAndLeavesOtherRowsAlone) {
  const int64_t tokens = 29, topk = 3, experts = 5, cols = 96;
  Random random(5);
  for (const Spread spread : {Spread::kEven, Spread::kOneExpert, Spread::kSkewed, Spread::kIdleExperts}) {
    const SortedRows sorted(tokens, topk, experts, spread, random);
    const DeviceRowsOf x(GetParam(), tokens, cols, random.normal(tokens * cols));
    const std::vector<float> gs = {1.0f, 33.0f, 0.7f, 900.0f, 5.0f};
    const DeviceArray<float> scales(gs);
    const DeviceArray<bf16> out(sorted.max_rows() * cols);
    DeviceActQuantArgs args;
    args.x = x.view;
    args.rows = sorted.device_rows();
    args.num_experts = experts;
    args.gather = true;
    args.topk = topk;
    args.scales = scales.data();
    args.per_expert = true;
    args.out = {out.data(), DType::kBF16, sorted.max_rows(), cols};
    run(args);
    const std::vector<bf16> actual = out.values();
    for (int64_t row = 0; row < sorted.max_rows(); ++row) {
      std::vector<bf16> expected(static_cast<size_t>(cols), bf16{0xffff});
      if (row < sorted.offsets.back()) {
        const auto first = x.host.begin() + sorted.slot_of_row[static_cast<size_t>(row)] / topk * cols;
        std::vector<float> unused;
        expected = nvfp4_rows(ActQuantKind::kNvfp4Static, std::vector<float>(first, first + cols), cols,
                              {gs[static_cast<size_t>(sorted.expert_of(row))]}, unused);
      }
      ASSERT_TRUE(same_bytes(bytes_of(&actual[static_cast<size_t>(row * cols)], cols),
                             bytes_of(expected.data(), cols)))
          << row;
    }
  }
}

TEST_P(CudaActQuant, Nvfp4InPlace) {
  if (GetParam() != DType::kBF16) GTEST_SKIP();
  const int64_t rows = 17, cols = 2064;
  const DeviceRowsOf x(DType::kBF16, rows, cols, rows_of_every_kind(rows, cols, 9));
  const DeviceArray<float> row_scales(rows);
  DeviceActQuantArgs args;
  args.kind = DeviceActQuantKind::kNvfp4PerToken;
  args.x = args.out = x.view;
  args.row_scales = row_scales.data();
  run(args);
  std::vector<float> expected_scales;
  const std::vector<bf16> expected =
      nvfp4_rows(ActQuantKind::kNvfp4PerToken, x.host, cols, {}, expected_scales);
  const std::vector<bf16> actual = x.b16.values();
  EXPECT_TRUE(same_bytes(bytes_of(actual.data(), rows * cols), bytes_of(expected.data(), rows * cols)));
}

// Quantises one row by the rule in device_act_quant.h.
struct Fp8Row {
  float scale = 0;
  std::vector<uint8_t> codes;
  explicit Fp8Row(std::span<const float> x) {
    float amax = 0;
    for (const float v : x) amax = std::abs(v) > amax ? std::abs(v) : amax;
    scale = std::min(amax, std::numeric_limits<float>::max()) / 448.0f;
    if (scale < 0x1p-126f) scale = 0;
    const float inverse = scale == 0 ? 0 : 1 / scale;
    for (const float v : x) codes.push_back(e4m3_encode(v * inverse));
  }
};

// Compares slab row `row` with the quantised x; columns past its end must be zero.
void expect_slab_row(const std::vector<uint8_t>& slabs, int64_t slab_rows, int64_t row,
                     std::span<const float> x, float scale) {
  const Fp8Row expected(x);
  ASSERT_EQ(std::bit_cast<uint32_t>(scale), std::bit_cast<uint32_t>(expected.scale)) << row;
  for (int64_t k = 0; k < num_slabs(static_cast<int64_t>(x.size())) * kFp8TileCols; ++k) {
    const uint8_t code = k < static_cast<int64_t>(x.size()) ? expected.codes[static_cast<size_t>(k)] : 0;
    ASSERT_EQ(slabs[static_cast<size_t>(fp8_slab_offset(slab_rows, row, k))], code) << row << ", " << k;
  }
}

TEST_P(CudaActQuant, Fp8RowsOfAllTokens) {
  for (const int64_t cols : {16, 128, 208, 2880, 7168}) {
    const int64_t rows = 21, slab_rows = slab_round_up(rows);
    const DeviceRowsOf x(GetParam(), rows, cols, rows_of_every_kind(rows, cols, 11));
    const DeviceArray<uint8_t> out(slabs_bytes(slab_rows, cols));
    const DeviceArray<float> row_scales(slab_rows);
    DeviceActQuantArgs args;
    args.kind = DeviceActQuantKind::kFp8PerToken;
    args.x = x.view;
    args.out = {out.data(), DType::kF8E4M3, slab_rows, cols};
    args.row_scales = row_scales.data();
    run(args);
    const std::vector<uint8_t> slabs = out.values();
    const std::vector<float> scales = row_scales.values();
    for (int64_t r = 0; r < rows; ++r)
      expect_slab_row(slabs, slab_rows, r, std::span(x.host).subspan(static_cast<size_t>(r * cols), cols),
                      scales[static_cast<size_t>(r)]);
  }
}

TEST_P(CudaActQuant, Fp8RowsOfExpertsGatheredAndNot) {
  const int64_t tokens = 33, experts = 37, cols = 160;
  Random random(6);
  for (const Spread spread : {Spread::kEven, Spread::kOneExpert, Spread::kSkewed, Spread::kIdleExperts})
    for (const auto& [gather, topk] : {std::pair<bool, int64_t>{false, 6}, {true, 6}, {true, 37}}) {
      const SortedRows sorted(tokens, topk, experts, spread, random);
      const int64_t x_rows = gather ? tokens : sorted.max_rows();
      const int64_t slab_rows = num_slab_rows(sorted.max_rows(), 0, experts);
      const DeviceRowsOf x(GetParam(), x_rows, cols, random.normal(x_rows * cols));
      const DeviceArray<uint8_t> out(slabs_bytes(slab_rows, cols));
      const DeviceArray<float> row_scales(slab_rows);
      DeviceActQuantArgs args;
      args.kind = DeviceActQuantKind::kFp8PerToken;
      args.x = x.view;
      args.rows = sorted.device_rows();
      args.num_experts = experts;
      args.gather = gather;
      args.topk = topk;
      args.out = {out.data(), DType::kF8E4M3, slab_rows, cols};
      args.row_scales = row_scales.data();
      run(args);
      const std::vector<uint8_t> slabs = out.values();
      const std::vector<float> scales = row_scales.values();
      int64_t written = 0;
      for (int64_t row = 0; row < sorted.offsets.back(); ++row, ++written) {
        const int64_t e = sorted.expert_of(row), start = sorted.offsets[static_cast<size_t>(e)];
        const int64_t slab_row = slab_first_row(e, start, 0) + row - start;
        const int64_t source = gather ? sorted.slot_of_row[static_cast<size_t>(row)] / topk : row;
        expect_slab_row(slabs, slab_rows, slab_row,
                        std::span(x.host).subspan(static_cast<size_t>(source * cols), cols),
                        scales[static_cast<size_t>(slab_row)]);
      }
      EXPECT_EQ(std::count_if(scales.begin(), scales.end(), [](float s) { return !std::isnan(s); }), written);
    }
}

TEST_P(CudaActQuant, Fp8MaskedRows) {
  const int64_t experts = 4, capacity = 11, cols = 64;
  Random random(7);
  const std::vector<int32_t> counts = {3, 0, 11, 1};
  const DeviceArray<int32_t> device_counts(counts);
  const int64_t slab_rows = num_slab_rows(experts * capacity, capacity, experts);
  const DeviceRowsOf x(GetParam(), experts * capacity, cols, random.normal(experts * capacity * cols));
  const DeviceArray<uint8_t> out(slabs_bytes(slab_rows, cols));
  const DeviceArray<float> row_scales(slab_rows);
  DeviceActQuantArgs args;
  args.kind = DeviceActQuantKind::kFp8PerToken;
  args.x = x.view;
  args.rows.max_rows = experts * capacity;
  args.rows.capacity = capacity;
  args.rows.counts = device_counts.data();
  args.num_experts = experts;
  args.out = {out.data(), DType::kF8E4M3, slab_rows, cols};
  args.row_scales = row_scales.data();
  run(args);
  const std::vector<uint8_t> slabs = out.values();
  const std::vector<float> scales = row_scales.values();
  for (int64_t e = 0; e < experts; ++e)
    for (int64_t r = 0; r < slab_round_up(capacity); ++r) {
      const int64_t row = e * slab_round_up(capacity) + r;
      if (r < counts[static_cast<size_t>(e)])
        expect_slab_row(slabs, slab_rows, row,
                        std::span(x.host).subspan(static_cast<size_t>((e * capacity + r) * cols), cols),
                        scales[static_cast<size_t>(row)]);
      else
        EXPECT_TRUE(std::isnan(scales[static_cast<size_t>(row)])) << row;
    }
}

TEST_P(CudaActQuant, NothingToDo) {
  DeviceActQuantArgs args;
  args.x = {nullptr, GetParam(), 0, 64};
  run(args);
  args.kind = DeviceActQuantKind::kFp8PerToken;
  run(args);
}

INSTANTIATE_TEST_SUITE_P(Types, CudaActQuant, testing::Values(DType::kBF16, DType::kF32),
                         [](const auto& p) { return std::string(dtype_name(p.param)); });

}  // namespace
}  // namespace fp4moe
