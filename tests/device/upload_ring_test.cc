#include "device/upload_ring.h"

#include <gtest/gtest.h>

#include <vector>

#include "device/device_memory.h"

namespace fp4moe {
namespace {

std::vector<uint8_t> pattern(size_t num_bytes, uint8_t seed) {
  std::vector<uint8_t> bytes(num_bytes);
  uint32_t state = seed;
  for (uint8_t& b : bytes) b = static_cast<uint8_t>((state = state * 1664525 + 1013904223) >> 24);
  return bytes;
}

TEST(UploadScope, LargeUploadsOfOddSizesArrive) {
  ThreadPool pool(3);
  const UploadScope scope(pool);
  for (const size_t num_bytes : {size_t{5} << 20, (size_t{100} << 20) + 12345, size_t{32} << 20}) {
    const std::vector<uint8_t> bytes = pattern(num_bytes, static_cast<uint8_t>(num_bytes));
    const auto size = static_cast<int64_t>(num_bytes);
    const Buffer buffer = Buffer::make(size, device_memory()).value();
    ASSERT_TRUE(device_memory().upload(buffer.data(), bytes.data(), size).ok());
    std::vector<uint8_t> back(num_bytes);
    ASSERT_TRUE(device_memory().download(back.data(), buffer.data(), size).ok());
    EXPECT_EQ(back, bytes);
  }
}

TEST(UploadScope, SharesOneRingAndMakesALargerOneWhenAsked) {
  ThreadPool pool(1);
  const auto alone = upload_ring(1 << 20).value();
  const UploadScope scope(pool);
  const auto first = upload_ring(1 << 20).value();
  EXPECT_NE(first, alone);
  EXPECT_EQ(upload_ring(1 << 20).value(), first);
  EXPECT_EQ(upload_ring(1 << 10).value(), first);
  const auto larger = upload_ring(2 << 20).value();
  EXPECT_NE(larger, first);
  EXPECT_GE(larger->slot_bytes(), 2 << 20);
  EXPECT_EQ(upload_ring(1 << 20).value(), larger);
}

TEST(UploadRing, SlotsAreReusedInOrderWithoutOvertaking) {
  constexpr int64_t kSlot = 4096;
  UploadRing ring = UploadRing::make(kSlot).value();
  for (uint8_t round = 0; round < 20; ++round) {
    const UploadRing::Slot slot = ring.next().value();
    std::fill(slot.host, slot.host + kSlot, round);
    ring.send(kSlot);
    ring.advance();
    ASSERT_TRUE(ring.finish().ok());
    std::vector<uint8_t> back(kSlot);
    ASSERT_TRUE(device_memory().download(back.data(), slot.device, kSlot).ok());
    EXPECT_EQ(back, std::vector<uint8_t>(kSlot, round));
  }
}

}  // namespace
}  // namespace fp4moe
