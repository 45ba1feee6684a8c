// Tests the kernels that only benchmarks run: random data in range, reads of any size, the matmul's result.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/buffer.h"
#include "device/device_memory.h"
#include "device/stream.h"
#include "kernels/cuda/layout/host_tiles.h"
#include "kernels/cuda/layout/tile_layout.h"
#include "kernels/device_peak.h"

namespace fp4moe {
namespace {

class PeakTest : public testing::Test {
 protected:
  const DevicePeakOps& ops_ = *sm90_peak_ops();
  Stream stream_ = Stream::make().value();
  StreamScope scope_{stream_};

  template <class T>
  std::vector<T> download(const Buffer& buffer) {
    EXPECT_TRUE(stream_.synchronize().ok());
    std::vector<T> host(static_cast<size_t>(buffer.num_bytes()) / sizeof(T));
    EXPECT_TRUE(device_memory().download(host.data(), buffer.data(), buffer.num_bytes()).ok());
    return host;
  }
  static Buffer device_buffer(int64_t num_bytes) { return Buffer::make(num_bytes, device_memory()).value(); }
};

TEST_F(PeakTest, ReadsRangesOfAnySize) {
  const Buffer data = device_buffer(64 << 20);
  for (const int64_t chunks : {0, 1, 5, 263, 264, 265, 1999, 4096}) ops_.read(data.data(), chunks * 16384);
  ops_.empty();
  EXPECT_TRUE(stream_.synchronize().ok());
}

TEST_F(PeakTest, NormalValuesHaveDeviationOne) {
  constexpr int64_t kN = 100003;
  const Buffer buffer = device_buffer((kN + 1) * 2);
  const std::vector<bf16> canary(kN + 1, float_to_bf16(77));
  ASSERT_TRUE(device_memory().upload(buffer.data(), canary.data(), buffer.num_bytes()).ok());
  ops_.fill_normal(buffer.as<bf16>(), kN, 1);
  const auto values = download<bf16>(buffer);
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < kN; ++i) {
    const double v = bf16_to_float(values[static_cast<size_t>(i)]);
    sum += v;
    squares += v * v;
  }
  EXPECT_NEAR(sum / kN, 0, 0.02);
  EXPECT_NEAR(squares / kN, 1, 0.02);
  EXPECT_EQ(bf16_to_float(values[kN]), 77);
}

TEST_F(PeakTest, TilesHoldWeightsInRange) {
  for (const Fp4Format format : {Fp4Format::kMxfp4, Fp4Format::kNvfp4}) {
    constexpr int64_t kRows = 192, kCols = 128;
    const Buffer buffer = device_buffer(tiled_bytes(format, kRows, kCols));
    ops_.fill_tiles(format, buffer.data(), num_tiles(kRows) * num_tiles(kCols), 7);
    const auto tiles = download<uint8_t>(buffer);
    double largest = 0, smallest = 1;
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < kCols; ++c) {
        const double w = std::abs(tiled_at(format, tiles.data(), kRows, kCols, r, c));
        largest = std::max(largest, w);
        if (w > 0) smallest = std::min(smallest, w);
      }
    }
    const double most = format == Fp4Format::kMxfp4 ? 6.0 / 32 : 6.0 * 1.875 / 32;
    EXPECT_EQ(largest, most);
    EXPECT_EQ(smallest, 0.5 / 256);
    ops_.fill_tiles(format, buffer.data(), num_tiles(kRows) * num_tiles(kCols), 7);
    EXPECT_EQ(download<uint8_t>(buffer), tiles);
  }
}

TEST_F(PeakTest, MatmulIsOne) {
  constexpr int64_t kN = 64, kElems = kN * kN;
  const Buffer buffer = device_buffer(3 * kElems * 2), workspace = device_buffer(kPeakMatmulWorkspace);
  ops_.fill_normal(buffer.as<bf16>(), 3 * kElems, 1);
  const Status status = ops_.matmul(buffer.as<bf16>(), buffer.as<bf16>() + kElems,
                                    buffer.as<bf16>() + 2 * kElems, kN, workspace.data());
  if (status.code() == StatusCode::kUnsupported) GTEST_SKIP() << status.message();
  ASSERT_TRUE(status.ok()) << status.message();
  const auto m = download<bf16>(buffer);
  const auto at = [&](int64_t matrix, int64_t i, int64_t k) {
    return static_cast<double>(bf16_to_float(m[static_cast<size_t>(matrix * kElems + i * kN + k)]));
  };
  // cuBLASLt's matrices are column-major: row j of out holds b_j . a_i.
  for (int64_t j = 0; j < kN; ++j) {
    for (int64_t i = 0; i < kN; ++i) {
      double sum = 0;
      for (int64_t k = 0; k < kN; ++k) sum += at(0, i, k) * at(1, j, k);
      EXPECT_NEAR(at(2, j, i), sum, 0.005 * std::abs(sum) + 1e-3);
    }
  }
}

}  // namespace
}  // namespace fp4moe
