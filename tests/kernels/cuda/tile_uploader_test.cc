// Tiles made on the GPU against pack_tiles() and pack_gate_up_tiles(), byte for byte.
#include "kernels/cuda/tile_uploader.h"

#include <gtest/gtest.h>

#include <optional>
#include <random>
#include <string>
#include <vector>

#include "device/device_memory.h"
#include "kernels/cuda/tile_layout.h"

namespace fp4moe {
namespace {

constexpr int64_t kCanary = 256;  // bytes on both sides of what is written

struct Matrix {
  std::vector<uint8_t> codes, scales;
  Fp4MatrixView view;
};

// Rows `step` apart in memory, as gate or up of alternating rows.
Matrix random_matrix(Fp4Format format, int64_t rows, int64_t cols, uint32_t seed, int64_t step = 1) {
  std::mt19937 rng(seed);
  const int block = fp4_block(format);
  const int low = format == Fp4Format::kMxfp4 ? 30 : 0, high = format == Fp4Format::kMxfp4 ? 150 : 0x7e;
  Matrix m;
  m.codes.resize(static_cast<size_t>(rows * step * cols / 2));
  m.scales.resize(static_cast<size_t>(rows * step * cols / block));
  for (uint8_t& b : m.codes) b = static_cast<uint8_t>(rng());
  std::uniform_int_distribution<int> scale(low, high);
  for (uint8_t& b : m.scales) b = static_cast<uint8_t>(scale(rng));
  m.view = {format, rows, cols, m.codes.data(), m.scales.data(), step * cols / 2, step * cols / block, 0.75f};
  return m;
}

class TileUploading : public testing::TestWithParam<Fp4Format> {
 protected:
  void SetUp() override {
    Result<TileUploader> made = TileUploader::make(pool_);
    ASSERT_TRUE(made.ok()) << made.status().message();
    uploader_ = std::move(*made);
  }

  // Device tiles of n x k between canaries, and two scales behind them.
  struct Target {
    Buffer memory;
    int64_t bytes = 0;
    uint8_t* tiles() const { return memory.data() + kCanary; }
    float* scales() const { return reinterpret_cast<float*>(tiles() + bytes + kCanary); }
  };
  Target make_target(int64_t n, int64_t k) {
    Target target;
    target.bytes = tiled_bytes(GetParam(), n, k);
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
    const float factor = pack_tiles(w, tiles.data()).value();
    expect_equal(targets[i], tiles, {factor * w.tensor_scale}, "matrix " + std::to_string(i));
  }
}

TEST_P(TileUploading, PairsGateAndUpOfAlternatingRows) {
  const int64_t n = 96, k = 2880;
  const Matrix both = random_matrix(GetParam(), n, k, 7, 2);
  Fp4MatrixView gate = both.view, up = both.view;
  up.codes += k / 2;
  up.scales += k / fp4_block(GetParam());
  up.tensor_scale = 0.5f;
  const Target target = make_target(2 * n, k);
  ASSERT_TRUE(uploader_->gate_up(gate, up, target.tiles(), target.scales()).ok());
  ASSERT_TRUE(uploader_->finish().ok());
  std::vector<uint8_t> tiles(static_cast<size_t>(target.bytes));
  const GateUpFactors f = pack_gate_up_tiles(gate, up, tiles.data()).value();
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
  const float large_factor = pack_tiles(wide.view, tiles.data()).value();
  expect_equal(large, tiles, {large_factor * 0.75f}, "larger than a slot");
  const float factor = pack_tiles(m.view, tiles.data()).value();
  for (const Target& target : targets) expect_equal(target, tiles, {factor * 0.75f}, "copy");
}

TEST_P(TileUploading, ManySmallMatricesFitIntoSeveralLaunches) {
  const Matrix m = random_matrix(GetParam(), 64, 64, 10);
  const Target target = make_target(64 * 600, 64);
  for (int64_t i = 0; i < 600; ++i)
    ASSERT_TRUE(uploader_->plain(m.view, target.tiles() + i * tile_bytes(GetParam()), target.scales()).ok());
  ASSERT_TRUE(uploader_->finish().ok());
  std::vector<uint8_t> tiles(static_cast<size_t>(target.bytes));
  float factor = 0;
  for (int64_t i = 0; i < 600; ++i)
    factor = pack_tiles(m.view, tiles.data() + i * tile_bytes(GetParam())).value();
  expect_equal(target, tiles, {factor * 0.75f}, "small");
}

INSTANTIATE_TEST_SUITE_P(Formats, TileUploading, testing::Values(Fp4Format::kMxfp4, Fp4Format::kNvfp4),
                         [](const auto& p) { return std::string(fp4_format_name(p.param)); });

TEST(TileUploadingMxfp4, ScalesTooFarApartAreRefusedAtTheEndAndForgottenAfterwards) {
  ThreadPool pool(1);
  Result<TileUploader> uploader = TileUploader::make(pool);
  ASSERT_TRUE(uploader.ok()) << uploader.status().message();
  Matrix m = random_matrix(Fp4Format::kMxfp4, 64, 64, 4);
  m.codes.assign(m.codes.size(), 0x11);
  m.scales[0] = 1;
  m.scales[1] = 200;
  const Buffer target = Buffer::make(tiled_bytes(Fp4Format::kMxfp4, 64, 64) + 256, device_memory()).value();
  float* scale = reinterpret_cast<float*>(target.data() + target.num_bytes() - 256);
  ASSERT_TRUE(uploader->plain(m.view, target.data(), scale).ok());
  const Status status = uploader->finish();
  ASSERT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("199 octaves"), std::string::npos) << status.message();
  for (size_t i = 0; i < 16; ++i) m.codes[i] = 0x80;  // a group of zeros does not count
  m.scales.assign(m.scales.size(), 200);
  m.scales[0] = 1;
  ASSERT_TRUE(uploader->plain(m.view, target.data(), scale).ok());
  EXPECT_TRUE(uploader->finish().ok());
}

}  // namespace
}  // namespace fp4moe
