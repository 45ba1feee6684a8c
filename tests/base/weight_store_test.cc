#include "base/weight_store.h"

#include <gtest/gtest.h>

#include <thread>

#include "base/check.h"

namespace fp4moe {
namespace {

Status write_seven(uint8_t* to) {
  *to = 7;
  return {};
}

// A store that already holds one packed byte and never calls the packing function.
class OneByte final : public WeightStore {
 public:
  Result<Buffer> next(int64_t num_bytes, const PackFn&) override {
    EXPECT_EQ(num_bytes, 1);
    ++num_taken;
    return Buffer::borrowed(&byte, 1);
  }
  void enter_part(const std::string& name) override { part = name; }
  bool packs() const override { return false; }

  std::string part;
  uint8_t byte = 42;
  int num_taken = 0;
};

TEST(WeightStore, WithoutOneWeightsArePacked) {
  EXPECT_TRUE(packs_weights());
  const Result<Buffer> weights = packed_weights(1, write_seven);
  ASSERT_TRUE(weights.ok());
  EXPECT_EQ(*weights->data(), 7);
}

TEST(WeightStore, AnErrorOfThePackingIsReturned) {
  const auto fails = [](uint8_t*) { return data_loss("bad scale"); };
  EXPECT_EQ(packed_weights(1, fails).status().message(), "bad scale");
}

TEST(WeightStore, TheInnermostScopeOfTheThreadIsAsked) {
  OneByte outer, inner;
  inner.byte = 43;
  {
    const WeightStoreScope outer_scope(outer);
    {
      const WeightStoreScope inner_scope(inner);
      EXPECT_EQ(*packed_weights(1, write_seven)->data(), 43);
    }
    EXPECT_FALSE(packs_weights());
    enter_weights_part("layer 3");
    EXPECT_EQ(*packed_weights(1, write_seven)->data(), 42);
    EXPECT_EQ(packed_weights(0, write_seven)->num_bytes(), 0);  // the store is not called for 0 bytes
    std::thread([] { EXPECT_EQ(*packed_weights(1, write_seven)->data(), 7); }).join();
  }
  EXPECT_EQ(*packed_weights(1, write_seven)->data(), 7);
  enter_weights_part("without a store");
  EXPECT_EQ(outer.part, "layer 3");
  EXPECT_EQ(inner.part, "");
  EXPECT_EQ(outer.num_taken, 1);
  EXPECT_EQ(inner.num_taken, 1);
}

}  // namespace
}  // namespace fp4moe
