// A lease's parts open as they are computed; those that are not open, or no longer, cannot be copied.
#include "engine/disagg/kv_lease.h"

#include <gtest/gtest.h>

#include <future>

#include "engine/fake_executor.h"

namespace fp4moe {
namespace {

class PromptLease : public testing::Test {
 protected:
  PromptLease() {
    for (const int32_t page : {2, 3, 5, 7}) {
      const std::vector<uint8_t> bytes(bytes_.size(), static_cast<uint8_t>(page));
      EXPECT_TRUE(executor_.write_page(0, page, 4, bytes.data()).ok());
    }
    lease_.watch([this] { ++num_changes_; });
  }
  StatusCode read(int64_t part) {
    return lease_.read(part, std::span(bytes_).first(static_cast<size_t>(lease_.shape().bytes_of(part))))
        .code();
  }

  FakeModel model_{fake_config(16), [](std::span<const int32_t>, std::span<float>) {}};
  FakeExecutor executor_{model_, LoopShape{}};  // pages of 4 tokens
  KvLease lease_{executor_, 10};
  std::vector<uint8_t> bytes_ = std::vector<uint8_t>(static_cast<size_t>(4 * executor_.kv_token_bytes()), 1);
  int num_changes_ = 0;
};

TEST_F(PromptLease, OpensItsPartsInOrder) {
  EXPECT_EQ(lease_.num_open(), 0);
  EXPECT_EQ(read(0), StatusCode::kCancelled);
  EXPECT_FALSE(lease_.has_ended());
  lease_.stage({0, {.full = {3, 5}}, 0}, 1);
  EXPECT_EQ(lease_.num_open(), 0);
  lease_.open_staged();
  EXPECT_EQ(lease_.num_open(), 1);
  EXPECT_EQ(num_changes_, 1);
  EXPECT_EQ(read(0), StatusCode::kOk);
  EXPECT_EQ(bytes_, std::vector<uint8_t>(bytes_.size(), 3));
  EXPECT_EQ(read(1), StatusCode::kCancelled);
  lease_.open_all({0, {.full = {3, 5, 7}}, 0});
  EXPECT_EQ(lease_.num_open(), 3);
  EXPECT_EQ(read(1), StatusCode::kOk);
  EXPECT_EQ(bytes_, std::vector<uint8_t>(bytes_.size(), 5));
  EXPECT_EQ(read(2), StatusCode::kOk);
  lease_.stage({0, {.full = {2}}, 0}, 1);  // never fewer
  lease_.open_staged();
  EXPECT_EQ(lease_.num_open(), 3);
  EXPECT_EQ(read(0), StatusCode::kOk);
  EXPECT_EQ(bytes_, std::vector<uint8_t>(bytes_.size(), 3));
}

// A preempted prompt gets other pages.
TEST_F(PromptLease, OpensAgainInOtherPages) {
  lease_.stage({0, {.full = {3, 5}}, 0}, 2);
  lease_.withdraw();
  lease_.open_staged();
  EXPECT_EQ(lease_.num_open(), 0) << "staged parts were not withdrawn";
  lease_.stage({0, {.full = {3, 5}}, 0}, 2);
  lease_.open_staged();
  EXPECT_EQ(read(1), StatusCode::kOk);
  lease_.withdraw();
  EXPECT_EQ(lease_.num_open(), 0);
  EXPECT_EQ(read(1), StatusCode::kCancelled);
  EXPECT_FALSE(lease_.has_ended());
  lease_.stage({0, {.full = {7, 2}}, 0}, 2);
  lease_.open_staged();
  EXPECT_EQ(read(1), StatusCode::kOk);
  EXPECT_EQ(bytes_, std::vector<uint8_t>(bytes_.size(), 2));
}

TEST_F(PromptLease, GivesTheErrorOfAnIncompletePage) {
  lease_.fail(internal_error("the draft model failed"));
  EXPECT_EQ(lease_.num_open(), std::nullopt);
  EXPECT_EQ(read(0), StatusCode::kInternal);
  EXPECT_EQ(num_changes_, 1);
}

TEST_F(PromptLease, OpensNothingOnceItHasEnded) {
  lease_.stage({0, {.full = {3}}, 0}, 1);
  lease_.end();
  lease_.open_staged();
  EXPECT_EQ(lease_.num_open(), std::nullopt);
  EXPECT_TRUE(lease_.has_ended());
  EXPECT_EQ(read(0), StatusCode::kCancelled);
  EXPECT_EQ(num_changes_, 1);
}

// Opening parts does not wait for a copy in progress; withdrawing them does.
TEST(StateLease, OnlyItsEndWaitsForACopy) {
  FakeModel model(fake_config(16, {}, 0, /*has_state=*/true), hashed_logits);
  FakeExecutor executor(model, LoopShape{.num_slots = 4});
  KvLease lease(executor, {0, {.full = {3}}, /*slot=*/2}, 4);
  std::promise<void> copies, may_end;
  executor.before_state_copy = [&] {
    copies.set_value();
    may_end.get_future().wait();
  };
  std::vector<uint8_t> state(static_cast<size_t>(lease.shape().bytes_of(1)));
  auto reading = std::async(std::launch::async, [&] { return lease.read(1, state); });
  copies.get_future().wait();
  lease.stage({0, {.full = {3}}, 2}, 1);
  lease.open_staged();
  EXPECT_EQ(lease.num_open(), 2);
  auto ending = std::async(std::launch::async, [&] { lease.end(); });
  EXPECT_EQ(ending.wait_for(std::chrono::milliseconds(30)), std::future_status::timeout);
  may_end.set_value();
  ending.get();
  EXPECT_TRUE(reading.get().ok());
}

// With a state, the parts after the pages are its pieces, until the lease ends.
TEST(StateLease, PartsAfterThePagesAreTheState) {
  FakeModel model(fake_config(16, {}, 0, /*has_state=*/true), hashed_logits);
  FakeExecutor executor(model, LoopShape{.num_slots = 4});
  const int64_t state_bytes = executor.state_bytes();
  ASSERT_EQ(state_bytes, 16);  // one number, and one input of 3 channels
  KvLease lease(executor, {0, {.full = {3, 5}}, /*slot=*/2}, 6);
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
