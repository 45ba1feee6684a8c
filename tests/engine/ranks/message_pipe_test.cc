// Messages between two ranks: sizes around those of pieces, a slow receiver, limits, and failures.
#include "engine/ranks/message_pipe.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "comm/job.h"

namespace fp4moe {
namespace {

using namespace std::chrono_literals;
using Bytes = std::vector<uint8_t>;

constexpr uint32_t kFirstSignal = 0xfffffffdu;  // signals wrap around
constexpr PipePlace kThere{.sender = 0, .receiver = 1, .data_slot = 12, .taken_slot = 13, .offset = 64};
constexpr PipePlace kBack{.sender = 1, .receiver = 0, .data_slot = 14, .taken_slot = 15, .offset = 64};

Bytes message_of(int64_t num_bytes) {
  Bytes message(static_cast<size_t>(num_bytes));
  for (size_t i = 0; i < message.size(); ++i)
    message[i] = static_cast<uint8_t>(i * 7 + i / 253 + message.size());
  return message;
}

class MessagePipes : public testing::Test {
 protected:
  std::unique_ptr<Job> job_ =
      Job::open(
          {.fabric = "threads", .num_ranks = 2, .heap_bytes = 64 + kPipeBytes, .first_signal = kFirstSignal})
          .value();
  MessagePipe end(const PipePlace& place, int rank) { return {job_->endpoint(rank), place, kFirstSignal}; }
};

constexpr int64_t kSizes[] = {0,
                              1,
                              8,
                              kPipePieceBytes - 1,
                              kPipePieceBytes,
                              kPipePieceBytes + 1,
                              2 * kPipePieceBytes,
                              5 * kPipePieceBytes + 3};

// Each message returns to its sender.
TEST_F(MessagePipes, MessagesArriveInOrder) {
  std::thread peer([&] {
    MessagePipe there = end(kThere, 1), back = end(kBack, 1);
    Bytes message;
    for (int i = 0; i < 3 * static_cast<int>(std::size(kSizes)); ++i) {
      if (i % 5 == 0) std::this_thread::sleep_for(5ms);
      ASSERT_TRUE(there.receive(int64_t{1} << 30, 10s, message).ok());
      ASSERT_TRUE(back.send(message, 10s).ok());
    }
  });
  MessagePipe there = end(kThere, 0), back = end(kBack, 0);
  Bytes message;
  for (int round = 0; round < 3; ++round)
    for (const int64_t size : kSizes) {
      ASSERT_TRUE(there.send(message_of(size), 10s).ok());
      ASSERT_TRUE(back.receive(size, 10s, message).ok());
      EXPECT_EQ(message, message_of(size)) << size;
    }
  peer.join();
}

TEST_F(MessagePipes, ASenderRunsAheadByTwoPieces) {
  MessagePipe sender = end(kThere, 0), receiver = end(kThere, 1);
  EXPECT_TRUE(sender.send(message_of(3), 0s).ok());
  EXPECT_TRUE(sender.send(message_of(4), 0s).ok());
  const Status late = sender.send(message_of(5), 10ms);
  EXPECT_EQ(late.code(), StatusCode::kDeadline);
  EXPECT_EQ(late.message(), "rank 0 waited 0.01 s for rank 1, which did not take a message");
  Bytes message;
  ASSERT_TRUE(receiver.receive(100, 0s, message).ok());
  EXPECT_EQ(message, message_of(3));
  EXPECT_TRUE(sender.send(message_of(5), 0s).ok());
}

TEST_F(MessagePipes, NothingToReceive) {
  Bytes message;
  EXPECT_EQ(end(kThere, 1).receive(100, 10ms, message).code(), StatusCode::kDeadline);
}

TEST_F(MessagePipes, TooLongMessagesAreRefused) {
  ASSERT_TRUE(end(kThere, 0).send(message_of(101), 0s).ok());
  Bytes message;
  const Status status = end(kThere, 1).receive(100, 0s, message);
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_EQ(status.message(), "rank 0 sends a message with 101 more bytes after 0; legal: at most 100");
}

TEST_F(MessagePipes, AFailureOfTheJobEndsBothEnds) {
  std::thread fails([&] {
    std::this_thread::sleep_for(20ms);
    job_->endpoint(0).fail(internal_error("a rank failed"));
  });
  Bytes message;
  EXPECT_EQ(end(kThere, 1).receive(100, 10s, message).message(), "a rank failed");
  fails.join();
  EXPECT_EQ(end(kThere, 0).send(message_of(3 * kPipePieceBytes), 10s).message(), "a rank failed");
}

}  // namespace
}  // namespace fp4moe
