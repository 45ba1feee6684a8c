// A sender's transfers: states of several pieces arrive bit for bit, and none delays the others for long.
#include "engine/disagg/kv_sender.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <map>
#include <thread>

#include "engine/fake_executor.h"
#include "engine/test_peer.h"

namespace fp4moe {
namespace {

constexpr uint64_t kEpoch = 9;

// A state of 3 pieces, with a small last one.
ModelConfig with_large_state() {
  ModelConfig config = fake_config(16, {}, 0, /*has_state=*/true);
  config.delta = {
      .num_key_heads = 2, .num_value_heads = 4, .key_head_dim = 256, .value_head_dim = 257, .conv_width = 4};
  return config;
}

class KvSenderTest : public testing::Test {
 protected:
  KvSenderTest() {
    auto client = connect_to(port_.port());
    EXPECT_TRUE(client.ok()) << client.status().to_string();
    sending_ = std::move(*client);
    receiving_ = port_.accept();
    uint32_t hash = 1;
    for (const int32_t slot : {1, 2}) {
      std::vector<uint8_t>& state = states_.emplace_back(static_cast<size_t>(from_.state_bytes()));
      for (uint8_t& byte : state) byte = static_cast<uint8_t>((hash = hash * 2654435761u + 12345) >> 24);
      EXPECT_TRUE(from_.write_state(0, slot, 0, state).ok());
    }
  }
  ~KvSenderTest() override {
    sender_.stop();
    if (thread_.joinable()) thread_.join();
  }
  void run() {
    thread_ = std::thread([this] { sender_.run(*sending_, kEpoch); });
  }
  static std::shared_ptr<KvLease> lease(FakeExecutor& executor, int32_t slot, int64_t num_tokens) {
    const PageTables tables{.full = {slot * 3, slot * 3 + 1, slot * 3 + 2}};
    return std::make_shared<KvLease>(executor, KvPlace{0, tables, slot}, num_tokens);
  }
  void post(uint64_t room, std::shared_ptr<KvLease> pages, int64_t first, int64_t take = 1) {
    EXPECT_TRUE(sender_.post_pages(
        room, {std::move(pages), first, take, [this](const Status& s) { failure_.set_value(s); }}));
  }
  KvFrame receive() {
    auto frame = receiving_->receive({.stage = KvStage::kToDecode,
                                      .epoch = kEpoch,
                                      .max_page_bytes = int64_t{sizeof(KvPageHeader)} + kKvStatePieceBytes},
                                     in_seconds(20));
    EXPECT_TRUE(frame.ok()) << frame.status().to_string();
    return frame.ok() ? std::move(*frame) : KvFrame{};
  }

  FakeModel model_{with_large_state(), [](std::span<const int32_t>, std::span<float>) {}};
  FakeExecutor from_{model_, LoopShape{.num_slots = 4}}, to_{model_, LoopShape{.num_slots = 4}};
  std::vector<std::vector<uint8_t>> states_;  // of slots 1 and 2 of from_
  TestPort port_;
  std::unique_ptr<KvSocket> sending_, receiving_;
  KvTraffic traffic_;
  KvSender sender_{traffic_};
  std::thread thread_;
  std::promise<Status> failure_;  // of the transfer that fails
};

TEST_F(KvSenderTest, TransfersTakeTurnsAndMessagesOvertakeThem) {
  // 3 pages and 3 pieces; pieces alone, because the decode node has the pages.
  post(1, lease(from_, 1, 9), 0);
  post(2, lease(from_, 2, 8), 2);
  EXPECT_TRUE(sender_.post(KvFrameType::kFirstToken, 3, "{}"));
  run();
  std::map<uint64_t, std::shared_ptr<KvLease>> leases{{1, lease(to_, 3, 9)}, {2, lease(to_, 1, 8)}};
  std::vector<uint64_t> rooms;
  std::map<uint64_t, int64_t> next{{1, 0}, {2, 2}};
  for (int i = 0; i < 10; ++i) {
    const KvFrame frame = receive();
    rooms.push_back(frame.header.room);
    if (frame.header.type != KvFrameType::kPage) continue;
    KvLease& lease = *leases.at(frame.header.room);
    const auto part = decode_page(frame.payload, lease.shape());
    ASSERT_TRUE(part.ok()) << part.status().to_string();
    EXPECT_EQ(part->index, next[frame.header.room]++);
    ASSERT_TRUE(lease.write(part->index, std::span(frame.payload).subspan(sizeof *part)).ok());
  }
  EXPECT_EQ(rooms, (std::vector<uint64_t>{3, 1, 2, 1, 2, 1, 2, 1, 1, 1}));
  for (const auto& [slot, state] : {std::pair(3, states_[0]), {1, states_[1]}}) {
    std::vector<uint8_t> arrived(state.size());
    ASSERT_TRUE(to_.read_state(0, slot, 0, arrived).ok());
    EXPECT_EQ(arrived, state) << slot;
  }
  sender_.stop();
  thread_.join();
  const KvTrafficTotals totals = traffic_.totals();
  EXPECT_EQ(totals.num_bytes, 9 * from_.kv_token_bytes() + 2 * from_.state_bytes());
  EXPECT_GT(totals.copy_seconds, 0);
  EXPECT_GT(totals.transfer_seconds, totals.copy_seconds);  // the two transfers took turns
}

// Pages that are read together arrive in separate frames, and are written together or one by one.
TEST_F(KvSenderTest, PagesOfABatchAreSentInOneTurn) {
  std::vector<uint8_t> page(static_cast<size_t>(4 * from_.kv_token_bytes()));
  for (const int32_t number : {3, 4, 5}) {
    std::ranges::fill(page, static_cast<uint8_t>(number));
    ASSERT_TRUE(from_.write_page(0, number, 4, page.data()).ok());
  }
  from_.batch_bytes = 8 * from_.kv_token_bytes();
  post(1, lease(from_, 1, 9), 0);
  post(2, lease(from_, 2, 8), 2);
  run();
  std::vector<uint64_t> rooms;
  std::vector<std::vector<uint8_t>> payloads;
  for (int i = 0; i < 9; ++i) {
    KvFrame frame = receive();
    rooms.push_back(frame.header.room);
    if (frame.header.room == 1) payloads.push_back(std::move(frame.payload));
  }
  EXPECT_EQ(rooms, (std::vector<uint64_t>{1, 1, 2, 1, 2, 1, 2, 1, 1}));
  std::vector<std::span<const uint8_t>> pages;
  for (size_t i = 0; i < 3; ++i) pages.push_back(std::span(payloads[i]).subspan(sizeof(KvPageHeader)));
  const auto arriving = lease(to_, 2, 9);
  ASSERT_TRUE(arriving->write(0, std::span(pages).first(2)).ok());
  ASSERT_TRUE(arriving->write(2, pages[2]).ok());
  for (const auto& [number, num_tokens] : {std::pair(6, 4), {7, 4}, {8, 1}}) {
    std::vector<uint8_t> arrived(static_cast<size_t>(num_tokens * to_.kv_token_bytes()));
    ASSERT_TRUE(to_.read_page(0, number, num_tokens, arrived.data()).ok());
    EXPECT_EQ(arrived, std::vector<uint8_t>(arrived.size(), static_cast<uint8_t>(number - 3)));
  }
}

// A transfer whose lease ends, or whose state cannot be read, stops; the others go on.
TEST_F(KvSenderTest, ATransferThatStopsLeavesTheOthers) {
  const auto ended = lease(from_, 1, 9);
  post(1, ended, 0);
  post(2, lease(from_, 2, 8), 2);
  int num_copies = 0;
  from_.before_state_copy = [&] {
    if (++num_copies == 2) from_.state_failure = internal_error("no such slot");
  };
  ended->end();
  run();
  EXPECT_EQ(receive().header.room, 2u);
  EXPECT_TRUE(sender_.post(KvFrameType::kFirstToken, 3, "{}"));
  EXPECT_EQ(receive().header.room, 3u);
  // The message can overtake the part that fails.
  std::future<Status> failure = failure_.get_future();
  ASSERT_EQ(failure.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_EQ(failure.get().message(), "no such slot");
}

// A transfer waits for its parts, and others pass it; a message is sent before parts that open with it.
TEST_F(KvSenderTest, PartsAreSentAsTheyOpen) {
  const auto growing = std::make_shared<KvLease>(from_, 9);
  growing->watch([this] { sender_.wake(); });
  const KvPlace place{0, {.full = {3, 4, 5}}, 1};
  run();
  post(1, growing, 0);
  post(2, lease(from_, 2, 4), 0);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(receive().header.room, 2u);  // a page and three pieces
  growing->stage(place, 2);
  growing->open_staged();
  for (const int64_t index : {0, 1}) {
    const KvFrame frame = receive();
    EXPECT_EQ(frame.header.room, 1u);
    EXPECT_EQ(decode_page(frame.payload, growing->shape())->index, index);
  }
  EXPECT_TRUE(sender_.post(KvFrameType::kFirstToken, 1, "{}"));
  growing->open_all(place);
  EXPECT_EQ(receive().header.type, KvFrameType::kFirstToken);
  for (int64_t index = 2; index < growing->shape().num_parts(); ++index)
    EXPECT_EQ(decode_page(receive().payload, growing->shape())->index, index);
}

// Calls `before_shape` before it first returns the bytes per token, which are part of the pages' shape.
struct InterruptedExecutor : FakeExecutor {
  using FakeExecutor::FakeExecutor;
  mutable std::function<void()> before_shape;
  int64_t kv_token_bytes() const override {
    if (before_shape) std::exchange(before_shape, nullptr)();
    return FakeExecutor::kv_token_bytes();
  }
};

// A message is also sent before parts that open, after it was posted, while the sender turns to earlier ones.
TEST_F(KvSenderTest, PartsThatOpenBehindAMessageFollowIt) {
  InterruptedExecutor from{model_, LoopShape{.num_slots = 4}};
  from.batch_bytes = 100 * from.kv_token_bytes();
  const auto growing = std::make_shared<KvLease>(from, 9);
  growing->watch([this] { sender_.wake(); });
  const KvPlace place{0, {.full = {3, 4, 5}}, 1};
  growing->stage(place, 1);
  growing->open_staged();
  post(1, growing, 0);
  const KvPageShape shape = growing->shape();
  from.before_shape = [&] {
    EXPECT_TRUE(sender_.post(KvFrameType::kFirstToken, 1, "{}"));
    growing->open_all(place);
  };
  run();
  EXPECT_EQ(decode_page(receive().payload, shape)->index, 0);
  EXPECT_EQ(receive().header.type, KvFrameType::kFirstToken);
  for (int64_t index = 1; index < shape.num_parts(); ++index)
    EXPECT_EQ(decode_page(receive().payload, shape)->index, index);
}

// A withdrawn transfer goes on when its parts are open again; one that ends leaves the sender idle.
TEST_F(KvSenderTest, AWithdrawnTransferGoesOn) {
  const auto growing = std::make_shared<KvLease>(from_, 9);
  growing->watch([this] { sender_.wake(); });
  growing->stage({0, {.full = {3, 4, 5}}, 1}, 1);
  growing->open_staged();
  run();
  post(1, growing, 0);
  EXPECT_EQ(decode_page(receive().payload, growing->shape())->index, 0);
  growing->withdraw();
  EXPECT_TRUE(sender_.post(KvFrameType::kFirstToken, 3, "{}"));
  EXPECT_EQ(receive().header.room, 3u);
  growing->stage({0, {.full = {6, 7, 8}}, 1}, 2);
  growing->open_staged();
  EXPECT_EQ(decode_page(receive().payload, growing->shape())->index, 1);
  growing->end();
  EXPECT_TRUE(sender_.post(KvFrameType::kFirstToken, 3, "{}"));
  EXPECT_EQ(receive().header.room, 3u);
}

// A room's later transfer replaces the one before; its parts carry its number.
TEST_F(KvSenderTest, ALaterTransferReplacesTheRoomsFirst) {
  const auto growing = std::make_shared<KvLease>(from_, 9);
  growing->watch([this] { sender_.wake(); });
  run();
  post(1, growing, 0);
  post(1, growing, 1, /*take=*/2);
  growing->open_all({0, {.full = {3, 4, 5}}, 1});
  for (int64_t index = 1; index < growing->shape().num_parts(); ++index) {
    const auto part = decode_page(receive().payload, growing->shape());
    EXPECT_EQ(part->index, index);
    EXPECT_EQ(part->take, 2);
  }
  EXPECT_TRUE(sender_.post(KvFrameType::kFirstToken, 3, "{}"));
  EXPECT_EQ(receive().header.room, 3u);
}

}  // namespace
}  // namespace fp4moe
