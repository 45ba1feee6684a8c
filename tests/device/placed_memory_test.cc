// A repeated load gets the addresses of the first one. The memory here is the host's.
#include "device/placed_memory.h"

#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "base/buffer.h"
#include "device/device_memory.h"

namespace fp4moe {
namespace {

// Counts the bytes that it has handed out.
class CountedMemory final : public MemoryResource {
 public:
  Result<uint8_t*> allocate(int64_t num_bytes) override {
    auto data = host_memory().allocate(num_bytes);
    if (data.ok()) sizes_[*data] = num_bytes;
    return data;
  }
  void release(uint8_t* data) override {
    EXPECT_EQ(sizes_.erase(data), 1u);
    host_memory().release(data);
  }
  Status upload(void* to, const void* from, int64_t n) override { return host_memory().upload(to, from, n); }
  Status download(void* to, const void* from, int64_t n) override {
    return host_memory().download(to, from, n);
  }
  bool is_host() const override { return true; }
  int64_t num_bytes() const {
    int64_t sum = 0;
    for (const auto& [data, size] : sizes_) sum += size;
    return sum;
  }

 private:
  std::unordered_map<uint8_t*, int64_t> sizes_;
};

struct Loaded {
  std::vector<Buffer> kept;
};

// Keeps 5 buffers and uses a temporary one beside each.
Loaded load(MemoryResource& memory, int64_t last = 500) {
  Loaded loaded;
  for (int64_t i = 1; i <= 5; ++i) {
    auto temporary = Buffer::make(1000 * i, memory);
    EXPECT_TRUE(temporary.ok());
    auto kept = Buffer::make(i == 5 ? last : 100 * i, memory);
    EXPECT_EQ(kept.ok(), i < 5 || last == 500);
    if (kept.ok()) loaded.kept.push_back(std::move(*kept));
  }
  return loaded;
}

TEST(PlacedMemory, RepeatsAddressesAndFreesWhatWasTemporary) {
  CountedMemory counted;
  {
    PlacedMemory memory(counted);
    std::optional<Loaded> model = load(memory);
    memory.seal();
    EXPECT_EQ(counted.num_bytes(), 1500);
    std::vector<uint8_t*> places;
    for (const Buffer& buffer : model->kept) places.push_back(buffer.data());
    for (int round = 0; round < 3; ++round) {
      model.reset();
      EXPECT_EQ(counted.num_bytes(), 1500) << "a place was given away";
      EXPECT_TRUE(memory.restart().ok());
      model = load(memory);
      EXPECT_EQ(counted.num_bytes(), 1500);
      for (size_t i = 0; i < places.size(); ++i) EXPECT_EQ(model->kept[i].data(), places[i]) << i;
    }
  }
  EXPECT_EQ(counted.num_bytes(), 0);
}

TEST(PlacedMemory, NamesAnAllocationOfAnotherSize) {
  PlacedMemory memory(host_memory());
  std::optional<Loaded> model = load(memory);
  memory.seal();
  model.reset();
  EXPECT_TRUE(memory.restart().ok());
  model = load(memory, 501);
  EXPECT_EQ(model->kept.size(), 4u);
  EXPECT_FALSE(memory.restart().ok());
  model.reset();
  EXPECT_TRUE(memory.restart().ok());
}

TEST(PlacedMemory, RefusesMoreAllocationsThanTheFirstTime) {
  PlacedMemory memory(host_memory());
  const auto one = [&] { return Buffer::make(64, memory); };
  EXPECT_TRUE(one().ok());
  memory.seal();
  EXPECT_TRUE(memory.restart().ok());
  EXPECT_TRUE(one().ok());
  const Status second = one().status();
  EXPECT_EQ(second.code(), StatusCode::kInternal);
  EXPECT_EQ(second.message(), "allocation 1 has 64 bytes; in the first load there were 1 allocations");
}

TEST(PlacedMemory, NamesABufferThatIsStillInUse) {
  PlacedMemory memory(host_memory());
  const auto buffer = Buffer::make(64, memory);
  memory.seal();
  EXPECT_EQ(memory.restart().message(), "allocation 0 of 1 (64 bytes) is still in use");
}

TEST(DeviceMemoryScope, ReplacesTheMemoryOfItsThread) {
  PlacedMemory memory(host_memory());
  MemoryResource& before = device_memory();
  {
    const DeviceMemoryScope scope(&memory);
    EXPECT_EQ(&device_memory(), &memory);
    const DeviceMemoryScope none(nullptr);
    EXPECT_EQ(&device_memory(), &before);
  }
  EXPECT_EQ(&device_memory(), &before);
}

}  // namespace
}  // namespace fp4moe
