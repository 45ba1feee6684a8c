// A lease that begins closed: a read waits until the pages are complete, or the lease has ended.
#include "engine/disagg/kv_lease.h"

#include <gtest/gtest.h>

#include <future>

#include "engine/fake_executor.h"

namespace fp4moe {
namespace {

class ClosedLease : public testing::Test {
 protected:
  std::future<Status> read_later() {
    return std::async(std::launch::async, [this] { return lease_.read(0, bytes_); });
  }
  static bool is_waiting(const std::future<Status>& reading) {
    return reading.wait_for(std::chrono::milliseconds(30)) == std::future_status::timeout;
  }

  FakeModel model_{fake_config(16), [](std::span<const int32_t>, std::span<float>) {}};
  FakeExecutor executor_{model_, LoopShape{}};
  KvLease lease_{executor_, 0, PageTables{.full = {3}}, /*slot=*/0, 2, /*is_open=*/false};
  std::vector<uint8_t> bytes_ = std::vector<uint8_t>(static_cast<size_t>(2 * executor_.kv_token_bytes()), 1);
};

TEST_F(ClosedLease, IsReadOnceItIsOpen) {
  auto reading = read_later();
  EXPECT_TRUE(is_waiting(reading));
  EXPECT_EQ(bytes_, std::vector<uint8_t>(bytes_.size(), 1));
  ASSERT_TRUE(executor_.write_page(0, 3, 2, std::vector<uint8_t>(bytes_.size(), 9).data()).ok());
  lease_.open({});
  EXPECT_TRUE(reading.get().ok());
  EXPECT_EQ(bytes_, std::vector<uint8_t>(bytes_.size(), 9));
  EXPECT_TRUE(lease_.read(0, bytes_).ok());
}

TEST_F(ClosedLease, GivesTheErrorOfAnIncompletePage) {
  auto reading = read_later();
  lease_.open(internal_error("the draft model failed"));
  EXPECT_EQ(reading.get().message(), "the draft model failed");
  EXPECT_EQ(lease_.read(0, bytes_).message(), "the draft model failed");
}

TEST_F(ClosedLease, EndsItsReaders) {
  auto reading = read_later();
  EXPECT_TRUE(is_waiting(reading));
  lease_.end();
  EXPECT_EQ(reading.get().code(), StatusCode::kCancelled);
  lease_.open({});
  EXPECT_EQ(lease_.read(0, bytes_).code(), StatusCode::kCancelled);
}

// With a state, the parts after the pages are its pieces, until the lease ends.
TEST(StateLease, PartsAfterThePagesAreTheState) {
  FakeModel model(fake_config(16, {}, 0, /*has_state=*/true), hashed_logits);
  FakeExecutor executor(model, LoopShape{.num_slots = 4});
  const int64_t state_bytes = executor.state_bytes();
  ASSERT_EQ(state_bytes, 16);  // one number, and one input of 3 channels
  KvLease lease(executor, 0, PageTables{.full = {3, 5}}, /*slot=*/2, 6);
  const KvPageShape shape = lease.shape();
  EXPECT_EQ(shape.num_parts(), 3);
  std::vector<uint8_t> state(static_cast<size_t>(shape.bytes_of(2)), 7), read(state.size());
  for (const int32_t slot : {1, 2, 3})
    ASSERT_TRUE(executor.write_state(0, slot, 0, std::vector<uint8_t>(state.size())).ok());
  ASSERT_TRUE(lease.write(2, state).ok());
  for (const int32_t slot : {1, 2, 3}) {
    ASSERT_TRUE(executor.read_state(0, slot, 0, read).ok());
    EXPECT_EQ(read, std::vector<uint8_t>(state.size(), slot == 2 ? 7 : 0)) << slot;
  }
  ASSERT_TRUE(lease.read(2, read).ok());
  EXPECT_EQ(read, state);
  lease.end();
  EXPECT_EQ(lease.write(2, state).code(), StatusCode::kCancelled);
  EXPECT_EQ(lease.read(2, read).code(), StatusCode::kCancelled);
}

}  // namespace
}  // namespace fp4moe
