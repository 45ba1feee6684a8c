// Compares tiles packed on the GPU with those of the host's pack functions, byte for byte.
#include "kernels/cuda/layout/tile_uploader.h"

#include <gtest/gtest.h>

#include <optional>
#include <random>
#include <string>
#include <vector>

#include "device/device_memory.h"
#include "kernels/cuda/layout/fp8_tile_layout.h"
#include "kernels/cuda/layout/host_tiles.h"
#include "kernels/cuda/layout/tile_layout.h"

namespace fp4moe {
namespace {

constexpr int64_t kCanary = 256;  // bytes on both sides of the written range

struct Matrix {
  std::vector<uint8_t> codes, scales;
  Fp4MatrixView view;
};

using Param = std::pair<TileKind, Fp4Format>;

// Returns a matrix with rows `step` rows apart in memory, like gate or up if they alternate. Some groups are
// zeros with an arbitrary scale.
Matrix random_matrix(const Param& param, int64_t rows, int64_t cols, uint32_t seed, int64_t step = 1) {
  const auto [kind, format] = param;
  std::mt19937 rng(seed);
  const int block = fp4_block(format);
  const int span = kind == TileKind::kFp8 ? 14 : 120;
  const int low = format == Fp4Format::kMxfp4 ? 150 - span : 0,
            high = format == Fp4Format::kMxfp4 ? 150 : 0x7e;
  Matrix m;
  m.codes.resize(static_cast<size_t>(rows * step * cols / 2));
  m.scales.resize(static_cast<size_t>(rows * step * cols / block));
  for (uint8_t& b : m.codes) b = static_cast<uint8_t>(rng());
  std::uniform_int_distribution<int> scale(low, high);
  for (uint8_t& b : m.scales) b = static_cast<uint8_t>(scale(rng));
  for (size_t group = 0; group < m.scales.size(); group += 1 + rng() % 40) {
    std::fill_n(m.codes.begin() + static_cast<int64_t>(group) * block / 2, block / 2, 0x80);
    m.scales[group] = static_cast<uint8_t>(rng() % 0x7f);
  }
  m.view = {format, rows, cols, m.codes.data(), m.scales.data(), step * cols / 2, step * cols / block, 0.75f};
  return m;
}

class TileUploading : public testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    Result<TileUploader> made = TileUploader::make(GetParam().first, pool_);
    ASSERT_TRUE(made.ok()) << made.status().message();
    uploader_ = std::move(*made);
  }

  // Device memory for the tiles of an n x k matrix between canaries, followed by two scales.
  struct Target {
    Buffer memory;
    int64_t bytes = 0;
    uint8_t* tiles() const { return memory.data() + kCanary; }
    float* scales() const { return reinterpret_cast<float*>(tiles() + bytes + kCanary); }
  };
  Target make_target(int64_t n, int64_t k) {
    Target target;
    target.bytes = is_fp8() ? fp8_tiled_bytes(format(), n, k) : tiled_bytes(format(), n, k);
    target.memory = Buffer::make(target.bytes + 2 * kCanary + 8, device_memory()).value();
    const std::vector<uint8_t> poison(static_cast<size_t>(target.memory.num_bytes()), 0xee);
    EXPECT_TRUE(device_memory().upload(target.memory.data(), poison.data(), target.memory.num_bytes()).ok());
    return target;
  }
  static void expect_equal(const Target& target, const std::vector<uint8_t>& tiles,
                           const std::vector<float>& scales, const std::string& what) {
    std::vector<uint8_t> got(static_cast<size_t>(target.memory.num_bytes()));
    ASSERT_TRUE(device_memory().download(got.data(), target.memory.data(), target.memory.num_bytes()).ok());
    for (int64_t i = 0; i < target.bytes; ++i)
      ASSERT_EQ(got[static_cast<size_t>(kCanary + i)], tiles[static_cast<size_t>(i)])
          << what << ", byte " << i;
    for (int64_t i = 0; i < kCanary; ++i) {
      ASSERT_EQ(got[static_cast<size_t>(i)], 0xee) << what;
      ASSERT_EQ(got[static_cast<size_t>(kCanary + target.bytes + i)], 0xee) << what;
    }
    std::vector<float> got_scales(scales.size());
    ASSERT_TRUE(device_memory()
                    .download(got_scales.data(), target.scales(), static_cast<int64_t>(scales.size() * 4))
                    .ok());
    EXPECT_EQ(got_scales, scales) << what;
  }

  static bool is_fp8() { return GetParam().first == TileKind::kFp8; }
  static Fp4Format format() { return GetParam().second; }
  // Packs on the host; returns the factor for the tensor scale.
  static float pack(const Fp4MatrixView& w, uint8_t* tiles) {
    if (!is_fp8()) return pack_tiles(w, tiles).value();
    EXPECT_TRUE(pack_fp8_tiles(w, tiles).ok());
    return 1;
  }
  static GateUpFactors pack(const Fp4MatrixView& gate, const Fp4MatrixView& up, uint8_t* tiles) {
    if (!is_fp8()) return pack_gate_up_tiles(gate, up, tiles).value();
    EXPECT_TRUE(pack_fp8_gate_up_tiles(gate, up, tiles).ok());
    return {1, 1};
  }

  ThreadPool pool_{2};
  std::optional<TileUploader> uploader_;
};

TEST_P(TileUploading, MakesTheTilesOfPackTiles) {
  std::vector<Matrix> matrices;
  std::vector<Target> targets;
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{64, 64}, {96, 160}, {40, 32}, {129, 2880}, {1, 32}, {2880, 96}}) {
    matrices.push_back(random_matrix(GetParam(), rows, cols, static_cast<uint32_t>(rows)));
    targets.push_back(make_target(rows, cols));
    ASSERT_TRUE(uploader_->plain(matrices.back().view, targets.back().tiles(), targets.back().scales()).ok());
  }
  const Status status = uploader_->finish();
  ASSERT_TRUE(status.ok()) << status.message();
  for (size_t i = 0; i < matrices.size(); ++i) {
    const Fp4MatrixView& w = matrices[i].view;
    std::vector<uint8_t> tiles(static_cast<size_t>(targets[i].bytes));
    const float factor = pack(w, tiles.data());
    expect_equal(targets[i], tiles, {factor * w.tensor_scale}, "matrix " + std::to_string(i));
  }
}

TEST_P(TileUploading, PairsGateAndUpOfAlternatingRows) {
  const int64_t n = 96, k = 2880;
  const Matrix both = random_matrix(GetParam(), n, k, 7, 2);
  Fp4MatrixView gate = both.view, up = both.view;
  up.codes += k / 2;
  up.scales += k / fp4_block(format());
  up.tensor_scale = 0.5f;
  const Target target = make_target(2 * n, k);
  ASSERT_TRUE(uploader_->gate_up(gate, up, target.tiles(), target.scales()).ok());
  ASSERT_TRUE(uploader_->finish().ok());
  std::vector<uint8_t> tiles(static_cast<size_t>(target.bytes));
  const GateUpFactors f = pack(gate, up, tiles.data());
  expect_equal(target, tiles, {f.gate * 0.75f, f.up * 0.5f}, "pair");
}

TEST_P(TileUploading, FillsManySlotsAndOneLargerThanASlot) {
  constexpr int kCopies = 6;
  const Matrix m = random_matrix(GetParam(), 4096, 4096, 8), wide = random_matrix(GetParam(), 8192, 9216, 9);
  std::vector<Target> targets;
  for (int i = 0; i < kCopies; ++i) {
    targets.push_back(make_target(4096, 4096));
    ASSERT_TRUE(uploader_->plain(m.view, targets.back().tiles(), targets.back().scales()).ok());
  }
  const Target large = make_target(8192, 9216);
  ASSERT_TRUE(uploader_->plain(wide.view, large.tiles(), large.scales()).ok());
  ASSERT_TRUE(uploader_->finish().ok());
  std::vector<uint8_t> tiles(static_cast<size_t>(large.bytes));
  const float large_factor = pack(wide.view, tiles.data());
  expect_equal(large, tiles, {large_factor * 0.75f}, "larger than a slot");
  tiles.resize(static_cast<size_t>(targets[0].bytes));
  const float factor = pack(m.view, tiles.data());
  for (const Target& target : targets) expect_equal(target, tiles, {factor * 0.75f}, "copy");
}

TEST_P(TileUploading, ManySmallMatricesFitIntoSeveralLaunches) {
  const Matrix m = random_matrix(GetParam(), 64, 64, 10);
  const Target target = make_target(64 * 600, 64);
  const int64_t each = target.bytes / 600;
  for (int64_t i = 0; i < 600; ++i)
    ASSERT_TRUE(uploader_->plain(m.view, target.tiles() + i * each, target.scales()).ok());
  ASSERT_TRUE(uploader_->finish().ok());
  std::vector<uint8_t> tiles(static_cast<size_t>(target.bytes));
  float factor = 0;
  for (int64_t i = 0; i < 600; ++i) factor = pack(m.view, tiles.data() + i * each);
  expect_equal(target, tiles, {factor * 0.75f}, "small");
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, TileUploading,
    testing::Values(Param{TileKind::kBf16, Fp4Format::kMxfp4}, Param{TileKind::kBf16, Fp4Format::kNvfp4},
                    Param{TileKind::kFp8, Fp4Format::kMxfp4}, Param{TileKind::kFp8, Fp4Format::kNvfp4}),
    [](const auto& p) {
      return std::string(p.param.first == TileKind::kFp8 ? "fp8_" : "") + fp4_format_name(p.param.second);
    });

class TileUploadingMxfp4 : public testing::TestWithParam<TileKind> {};

TEST_P(TileUploadingMxfp4, ScalesTooFarApartAreRefusedAtTheEndAndForgottenAfterwards) {
  ThreadPool pool(1);
  Result<TileUploader> uploader = TileUploader::make(GetParam(), pool);
  ASSERT_TRUE(uploader.ok()) << uploader.status().message();
  Matrix m = random_matrix({GetParam(), Fp4Format::kMxfp4}, 64, 64, 4);
  m.codes.assign(m.codes.size(), 0x11);
  m.scales[0] = 1;
  m.scales[1] = 200;
  const Buffer target = Buffer::make(16384, device_memory()).value();
  float* scale = reinterpret_cast<float*>(target.data() + target.num_bytes() - 256);
  ASSERT_TRUE(uploader->plain(m.view, target.data(), scale).ok());
  const Status status = uploader->finish();
  ASSERT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("199 octaves"), std::string::npos) << status.message();
  for (size_t i = 0; i < 16; ++i) m.codes[i] = 0x80;  // the scale of a zero group is ignored
  m.scales.assign(m.scales.size(), 200);
  m.scales[0] = 1;
  ASSERT_TRUE(uploader->plain(m.view, target.data(), scale).ok());
  EXPECT_TRUE(uploader->finish().ok());
}

INSTANTIATE_TEST_SUITE_P(Kinds, TileUploadingMxfp4, testing::Values(TileKind::kBf16, TileKind::kFp8),
                         [](const auto& p) { return p.param == TileKind::kFp8 ? "fp8" : "bf16"; });

// Covers tiny and huge row factors: subnormal scales, rows of zeros, and the widest span.
TEST(TileUploadingFp8, RowsHaveTheirOwnFactor) {
  ThreadPool pool(1);
  Result<TileUploader> uploader = TileUploader::make(TileKind::kFp8, pool);
  ASSERT_TRUE(uploader.ok()) << uploader.status().message();
  const int64_t k = 128;
  for (const Fp4Format format : {Fp4Format::kMxfp4, Fp4Format::kNvfp4}) {
    const bool mx = format == Fp4Format::kMxfp4;
    const int64_t n = mx ? 255 : 127, groups = k / fp4_block(format);
    Matrix m = random_matrix({TileKind::kFp8, format}, n, k, 5);
    for (int64_t r = 0; r < n; ++r) {
      for (int64_t g = 0; g < groups; ++g)
        m.scales[static_cast<size_t>(r * groups + g)] =
            static_cast<uint8_t>(g == 1 ? r : std::max<int64_t>(0, r - (mx ? 14 : 127)));
      if (r % 16 == 3) std::fill_n(m.codes.begin() + r * k / 2, k / 2, 0x08);
    }
    const int64_t bytes = fp8_tiled_bytes(format, n, k);
    const Buffer target = Buffer::make(bytes + 256, device_memory()).value();
    ASSERT_TRUE(uploader->plain(m.view, target.data(), reinterpret_cast<float*>(target.data() + bytes)).ok());
    ASSERT_TRUE(uploader->finish().ok());
    std::vector<uint8_t> expected(static_cast<size_t>(bytes)), got(expected.size());
    ASSERT_TRUE(pack_fp8_tiles(m.view, expected.data()).ok());
    ASSERT_TRUE(device_memory().download(got.data(), target.data(), bytes).ok());
    EXPECT_EQ(got, expected) << fp4_format_name(format);
  }
}

}  // namespace
}  // namespace fp4moe
