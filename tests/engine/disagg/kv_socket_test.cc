// Connections: frames arrive complete or not at all, within their deadline and the memory budget.
#include "engine/disagg/kv_socket.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <future>

#include "engine/test_peer.h"

namespace fp4moe {
namespace {

constexpr uint64_t kEpoch = 0x1234567890abcdefu;
const KvLegal kLegal{.stage = KvStage::kToPrefill, .epoch = kEpoch};

double seconds_since(KvSocket::Clock::time_point start) {
  return std::chrono::duration<double>(KvSocket::Clock::now() - start).count();
}

std::vector<uint8_t> prefill_frame(size_t num_bytes) {
  return kv_frame(KvFrameType::kPrefill, kEpoch, 3, std::string_view(std::string(num_bytes, 'a')));
}

TEST(KvSocket, FramesArriveWholeOrNotAtAll) {
  TestPort port;
  auto client = connect_to(port.port());
  ASSERT_TRUE(client.ok()) << client.status().to_string();
  const auto server = port.accept();
  for (const size_t size : {3u, 1u << 20, (1u << 20) + 1, 9u << 20}) {
    const std::vector<uint8_t> frame = prefill_frame(size);
    auto sent = std::async(std::launch::async, [&] { return (*client)->send(frame); });
    const auto got = server->receive(kLegal);
    ASSERT_TRUE(got.ok()) << got.status().to_string();
    EXPECT_TRUE(sent.get().ok());
    EXPECT_EQ(got->header.room, 3u);
    EXPECT_EQ(got->payload, std::vector<uint8_t>(size, 'a'));
  }
  const std::vector<uint8_t> frame = prefill_frame(3);
  ASSERT_TRUE((*client)->send(std::span(frame).first(frame.size() - 1)).ok());
  (*client)->shut_down();
  EXPECT_EQ(server->receive(kLegal).status().code(), StatusCode::kUnavailable);
}

// The first bytes of a frame can arrive with the last ones of the frame before, in any pieces.
TEST(KvSocket, FramesInAnyPiecesAreReceived) {
  const std::vector<size_t> sizes = {0, 1, 39, 40, 41, 1000, 0, 0, 70'000, 3, (1 << 20) + 7, 5};
  std::vector<uint8_t> bytes;
  for (const size_t size : sizes)
    for (const uint8_t byte : prefill_frame(size)) bytes.push_back(byte);
  for (const size_t piece : {7u, 40u, 41u, 4096u, 100'000u, 4u << 20}) {
    TestPort port;
    auto client = connect_to(port.port());
    ASSERT_TRUE(client.ok()) << client.status().to_string();
    const auto server = port.accept();
    const size_t num_sent = piece < 4096 ? 80'000 : bytes.size();
    auto sent = std::async(std::launch::async, [&] {
      for (size_t at = 0; at < num_sent; at += piece)
        if (!(*client)->send(std::span(bytes).subspan(at, std::min(piece, num_sent - at))).ok()) break;
      (*client)->shut_down();
    });
    for (size_t at = 0, i = 0; i < sizes.size(); ++i) {
      at += sizeof(KvFrameHeader) + sizes[i];
      const auto got = server->receive(kLegal, in_seconds(20));
      ASSERT_EQ(got.ok(), at <= num_sent) << piece << ", " << i << ": " << got.status().to_string();
      if (!got.ok()) break;
      EXPECT_EQ(got->payload, std::vector<uint8_t>(sizes[i], 'a')) << piece << ", " << i;
    }
    EXPECT_FALSE(server->receive(kLegal, in_seconds(20)).ok());
    sent.get();
  }
}

TEST(KvSocket, AnUnreachableHostIsUnavailable) {
  TestPort port;
  const int free_port = [] { return TestPort().port(); }();
  EXPECT_EQ(connect_to(free_port).status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(KvSocket::connect({"no.such.host.invalid", 1}, false, {}).status().code(),
            StatusCode::kInvalidArgument);
  const Status remote = KvSocket::connect({"192.0.2.1", 1}, /*only_loopback=*/true, {}).status();
  EXPECT_EQ(remote.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(remote.message().find("--disaggregation-secret-file"), std::string::npos) << remote.message();
  auto silent = connect_to(port.port());
  ASSERT_TRUE(silent.ok());
  EXPECT_EQ((*silent)->receive(kLegal, in_seconds(0.05)).status().code(), StatusCode::kUnavailable);
}

// Sends one byte every few milliseconds, so that neither header nor payload is ever complete.
TEST(KvSocket, DrippedFramesAreCutOff) {
  for (const size_t whole : {0u, 20u, 41u, 60u}) {
    TestPort port;
    const Stranger stranger(port.port());
    const auto server = port.accept({.timeout_seconds = 0.3});
    const std::vector<uint8_t> frame = prefill_frame(1 << 20);
    const std::string_view bytes(reinterpret_cast<const char*>(frame.data()), frame.size());
    ASSERT_TRUE(whole == 0 || stranger.send(bytes.substr(0, whole)));
    std::atomic<bool> ends = false;
    std::thread drips([&] {
      for (size_t i = whole; !ends; ++i) {
        stranger.send(bytes.substr(i, 1));
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    });
    const auto start = KvSocket::Clock::now();
    const Status status = server->receive(kLegal).status();
    EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.to_string();
    EXPECT_NE(status.message().find("too slowly"), std::string::npos) << status.message();
    EXPECT_GE(seconds_since(start), 0.29);
    ends = true;
    drips.join();
  }
}

// Receives a frame of num_bytes bytes that is sent in pieces, with pauses. The test needs it to take longer
// than least_seconds.
void receive_slow_frame(KvSocketOptions options, size_t num_bytes, size_t piece,
                        std::chrono::milliseconds pause, double least_seconds) {
  TestPort port;
  const Stranger stranger(port.port());
  const auto server = port.accept(options);
  const std::vector<uint8_t> frame = prefill_frame(num_bytes);
  std::thread slow([&] {
    const std::string_view bytes(reinterpret_cast<const char*>(frame.data()), frame.size());
    for (size_t done = 0; done < bytes.size(); done += piece) {
      stranger.send(bytes.substr(done, piece));
      std::this_thread::sleep_for(pause);
    }
  });
  const auto start = KvSocket::Clock::now();
  const auto got = server->receive(kLegal);
  EXPECT_TRUE(got.ok()) << got.status().to_string();
  EXPECT_GT(seconds_since(start), least_seconds) << "the test's frame was too fast";
  slow.join();
}

// The deadline advances with the bytes: a frame that is fast enough can take longer than the timeout.
TEST(KvSocket, ASlowButSteadyFrameIsReceived) {
  receive_slow_frame({.timeout_seconds = 0.5}, 2 << 20 /* 8 s at the minimum rate */, 128 << 10,
                     std::chrono::milliseconds(60), 0.6);
}

// A wait ends only when many bytes have arrived, but the bytes before them count against the timeout too.
TEST(KvSocket, ASlowPeersBytesCountInTime) {
  receive_slow_frame({.timeout_seconds = 0.4}, 300 << 10, 6 << 10, std::chrono::milliseconds(12), 0.5);
}

// Sending also fails if the peer does not read.
TEST(KvSocket, SendingToAPeerThatDoesNotReadEnds) {
  TestPort port;
  const Stranger stranger(port.port());
  const auto server = port.accept({.timeout_seconds = 0.3});
  const std::vector<uint8_t> frame = prefill_frame(60 << 20);
  const Status status = server->send(frame);
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("too slowly"), std::string::npos) << status.message();
}

// A header that promises 64 MiB takes memory only as its bytes arrive. Messages of all connections share a
// budget, which is returned with the frame.
TEST(KvSocket, LargeMessagesShareABudget) {
  const auto budget = ByteBudget::make(4 << 20);
  TestPort port;
  auto first = connect_to(port.port()), second = connect_to(port.port());
  ASSERT_TRUE(first.ok() && second.ok());
  const auto one = port.accept({.budget = budget}), two = port.accept({.budget = budget});
  const auto exchange = [&](KvSocket& client, KvSocket& server, size_t size) {
    auto sent = std::async(std::launch::async, [&] { return client.send(prefill_frame(size)); });
    auto got = server.receive(kLegal);
    if (!got.ok()) server.shut_down();
    static_cast<void>(sent.get());
    return got;
  };
  {
    const auto small = exchange(**first, *one, 1 << 20);
    ASSERT_TRUE(small.ok());
    EXPECT_EQ(budget->used(), 0);
    const auto held = exchange(**first, *one, 3 << 20);
    ASSERT_TRUE(held.ok()) << held.status().to_string();
    EXPECT_EQ(budget->used(), 3 << 20);
    const auto refused = exchange(**second, *two, 2 << 20);
    EXPECT_EQ(refused.status().code(), StatusCode::kUnavailable);
    EXPECT_EQ(budget->used(), 3 << 20);
  }
  EXPECT_EQ(budget->used(), 0);
  EXPECT_TRUE(exchange(**first, *one, 4 << 20).ok());

  const Stranger promises(port.port());
  const auto server = port.accept({.timeout_seconds = 0.2, .budget = budget});
  const KvFrameHeader header{.type = KvFrameType::kPrefill, .epoch = kEpoch, .num_bytes = kMaxKvMessageBytes};
  promises.send(std::string_view(reinterpret_cast<const char*>(&header), sizeof header));
  EXPECT_NE(server->receive(kLegal).status().message().find("too slowly"), std::string::npos);
  EXPECT_EQ(budget->used(), 0);
}

}  // namespace
}  // namespace fp4moe
