#include "base/hash.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

namespace fp4moe {
namespace {

std::vector<uint8_t> bytes_of(int64_t n) {
  std::vector<uint8_t> bytes(static_cast<size_t>(n));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 37 + i / 7);
  return bytes;
}

TEST(Hash64Test, EveryFlippedBitShows) {
  for (const int64_t n : {1, 7, 8, 9, 31, 32, 33, 64, 100, 200}) {
    std::vector<uint8_t> bytes = bytes_of(n);
    std::set<uint64_t> seen = {hash64(bytes.data(), n)};
    for (int64_t bit = 0; bit < 8 * n; ++bit) {
      uint8_t& byte = bytes[static_cast<size_t>(bit / 8)];
      byte = static_cast<uint8_t>(byte ^ (1 << (bit % 8)));
      EXPECT_TRUE(seen.insert(hash64(bytes.data(), n)).second) << n << " bytes, bit " << bit;
      byte = static_cast<uint8_t>(byte ^ (1 << (bit % 8)));
    }
  }
}

TEST(Hash64Test, LengthSeedAndOrderCount) {
  const std::vector<uint8_t> zeros(300, 0);
  std::set<uint64_t> seen;
  for (int64_t n = 0; n <= 300; ++n) EXPECT_TRUE(seen.insert(hash64(zeros.data(), n)).second) << n;
  EXPECT_NE(hash64("a", 1, 1), hash64("a", 1, 2));
  std::vector<uint8_t> bytes = bytes_of(96);
  const uint64_t before = hash64(bytes.data(), 96);
  for (size_t i = 0; i < 32; ++i) std::swap(bytes[i], bytes[i + 32]);  // swaps two blocks
  EXPECT_NE(hash64(bytes.data(), 96), before);
}

TEST(Hash64Test, DoesNotDependOnAlignment) {
  const std::vector<uint8_t> bytes = bytes_of(101);
  std::vector<uint8_t> shifted(1, 9);
  shifted.insert(shifted.end(), bytes.begin(), bytes.end());
  EXPECT_EQ(hash64(shifted.data() + 1, 101), hash64(bytes.data(), 101));
}

// Weight caches and the frames between nodes have these hashes.
TEST(Hash64Test, ValuesStay) {
  const std::vector<std::pair<int64_t, uint64_t>> known = {
      {0, 0xcfe0a38f63417f67u},  {1, 0x2f7510a0036f3c67u},   {31, 0x5b24a8e81a4b4d87u},
      {32, 0x7a0ad3187170815au}, {100, 0x7589529debb66286u}, {1000, 0xdb46f33408331075u}};
  for (const auto& [n, hash] : known) EXPECT_EQ(hash64(bytes_of(n).data(), n, 5), hash) << n;
}

}  // namespace
}  // namespace fp4moe
