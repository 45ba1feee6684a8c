#include "base/buffer.h"

#include <gtest/gtest.h>

#include <cstring>
#include <utility>

namespace fp4moe {
namespace {

bool is_aligned(const void* p, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

TEST(Buffer, IsAlignedAndWritableToItsEnd) {
  for (int64_t n :
       {int64_t{1}, int64_t{63}, int64_t{64}, int64_t{65}, int64_t{4 << 20}, int64_t{(4 << 20) + 1}}) {
    Result<Buffer> buffer = Buffer::make(n);
    ASSERT_TRUE(buffer.ok());
    EXPECT_EQ(buffer->num_bytes(), n);
    EXPECT_TRUE(is_aligned(buffer->data(), n >= 4 << 20 ? 2 << 20 : 64)) << n;
    std::memset(buffer->data(), 0xa5, static_cast<size_t>(n));
  }
}

TEST(Buffer, EmptyHasNoData) {
  Result<Buffer> buffer = Buffer::make(0);
  ASSERT_TRUE(buffer.ok());
  EXPECT_EQ(buffer->data(), nullptr);
  EXPECT_EQ(buffer->num_bytes(), 0);
}

TEST(Buffer, RefusesImpossibleSizes) {
  EXPECT_EQ(Buffer::make(-1).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Buffer::make(INT64_MAX).status().code(), StatusCode::kDoesNotFit);
  EXPECT_EQ(Arena::make(INT64_MAX).status().code(), StatusCode::kDoesNotFit);
  EXPECT_EQ(Arena::make(-1000).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Buffer::make(INT64_MAX - (4 << 20)).status().code(), StatusCode::kDoesNotFit);
}

// Non-host memory that can refuse allocations.
class FakeMemory final : public MemoryResource {
 public:
  Result<uint8_t*> allocate(int64_t num_bytes) override {
    if (num_bytes > 64) return does_not_fit("64 bytes are left");
    return new uint8_t[64];
  }
  void release(uint8_t* data) override { delete[] data; }
  Status upload(void* to, const void* from_host, int64_t num_bytes) override {
    ++num_uploads;
    return host_memory().upload(to, from_host, num_bytes);
  }
  Status download(void* to_host, const void* from, int64_t num_bytes) override {
    return host_memory().download(to_host, from, num_bytes);
  }
  bool is_host() const override { return false; }
  int num_uploads = 0;
};

TEST(Buffer, CopiesWhatIsOnTheHost) {
  FakeMemory memory;
  const float values[] = {1, -2, 0.5f};
  const Result<Buffer> copy = Buffer::copy_of(values, memory);
  ASSERT_TRUE(copy.ok());
  EXPECT_EQ(copy->num_bytes(), 12);
  EXPECT_EQ(std::memcmp(copy->data(), values, 12), 0);
  EXPECT_EQ(memory.num_uploads, 1);
  EXPECT_EQ(Buffer::copy_of(nullptr, 0, memory)->data(), nullptr);
  EXPECT_EQ(memory.num_uploads, 1) << "an empty buffer needs no upload";
  const uint8_t many[65] = {};
  EXPECT_EQ(Buffer::copy_of(many, 65, memory).status().code(), StatusCode::kDoesNotFit);
}

TEST(Buffer, MovesHandTheMemoryOver) {
  Buffer a = *Buffer::make(100);
  uint8_t* data = a.data();
  Buffer b = std::move(a);
  EXPECT_EQ(b.data(), data);
  Buffer c = *Buffer::make(10);
  c = std::move(b);
  EXPECT_EQ(c.data(), data);
  EXPECT_EQ(c.num_bytes(), 100);
}

TEST(Buffer, BorrowedMemoryIsLeftAlone) {
  uint8_t bytes[64] = {1};
  {
    Buffer a = Buffer::borrowed(bytes, 64);
    EXPECT_EQ(a.data(), bytes);
    EXPECT_EQ(a.num_bytes(), 64);
    Buffer b = std::move(a);
    b = *Buffer::make(10);  // a buffer frees only memory that it owns
    EXPECT_EQ(bytes[0], 1);
  }
  EXPECT_EQ(bytes[0], 1);
}

TEST(Arena, HandsOutAlignedDisjointPieces) {
  Arena arena = *Arena::make(Arena::padded(3) + Arena::padded(5 * sizeof(double)));
  uint8_t* bytes = arena.take<uint8_t>(3);
  double* doubles = arena.take<double>(5);
  EXPECT_TRUE(is_aligned(bytes, 64));
  EXPECT_TRUE(is_aligned(doubles, 64));
  EXPECT_EQ(reinterpret_cast<uint8_t*>(doubles) - bytes, 64);
  EXPECT_EQ(arena.used_bytes(), arena.capacity_bytes());
  arena.reset();
  EXPECT_EQ(arena.used_bytes(), 0);
  EXPECT_EQ(arena.take<uint8_t>(1), bytes);
}

TEST(Arena, AnUnpaddedSizeIsEnoughForItsLastPiece) {
  Arena arena = *Arena::make(100);
  EXPECT_NE(arena.take<uint8_t>(100), nullptr);
}

TEST(ArenaDeathTest, RunningOutIsOurMistake) {
  Arena arena = *Arena::make(128);
  arena.take<uint8_t>(65);
  EXPECT_DEATH(arena.take<uint8_t>(1), "want 1 bytes, 0 of 128 left");
  EXPECT_DEATH(arena.take<uint8_t>(-1), "want -1 bytes");
}

}  // namespace
}  // namespace fp4moe
