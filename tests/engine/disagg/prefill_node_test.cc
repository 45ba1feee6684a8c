// A prefill node's port under attack: strangers can occupy only a bounded number of connections, threads and
// bytes, and a decode node is still served.
#include "engine/disagg/prefill_node.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <optional>

#include "base/check.h"
#include "engine/test_loop.h"
#include "engine/test_peer.h"
#include "support/eventually.h"

namespace fp4moe {
namespace {

const KvHello kHello{0, {{"model", "m"}, {"--page-size", "4"}}};

class PrefillNodeTest : public testing::Test {
 protected:
  void start(NodeLinkOptions options = {}) {
    options_ = options;
    auto made = PrefillNode::make(*loop_, kHello, "127.0.0.1", 0, options);
    ASSERT_TRUE(made.ok()) << made.status().to_string();
    node_ = std::move(*made);
  }
  int port() const { return node_->port(); }

  // A connection after its hello, with its epoch.
  struct Guest {
    std::unique_ptr<KvSocket> socket;
    uint64_t epoch = 0;
    Status send(KvFrameType type, uint64_t room, std::string_view payload) {
      return socket->send(kv_frame(type, epoch, room, payload));
    }
    Result<KvFrame> receive(double seconds = 20) {
      return socket->receive({.stage = KvStage::kToDecode, .epoch = epoch}, in_seconds(seconds));
    }
  };
  Result<Guest> greet() {
    auto socket = connect_to(port());
    if (!socket.ok()) return socket.status();
    const auto hello = greet_prefill_node(**socket, kHello, *options_.secret, in_seconds(20));
    if (!hello.ok()) return hello.status();
    return Guest{std::move(*socket), hello->epoch};
  }
  static std::string prefill_payload(std::vector<int32_t> ids) {
    SamplingParams sampling{.temperature = 0, .max_new_tokens = 4};
    sampling.seed = 1;
    return encode_prefill({.input_ids = std::move(ids), .sampling = sampling});
  }
  // Gets a prompt's first token over a new connection.
  Status works() {
    auto guest = greet();
    if (!guest.ok()) return guest.status();
    FP4MOE_RETURN_IF_ERROR(guest->send(KvFrameType::kPrefill, 1, prefill_payload({5, 6, 7})));
    const auto first = guest->receive();
    if (!first.ok()) return first.status();
    return first->header.type == KvFrameType::kFirstToken ? Status() : decode_failure(first->payload);
  }
  void expect_works() {
    const Status status = works();
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
  bool is_empty() {
    return eventually([&] {
      const EngineStats s = loop_->stats();
      return s.num_held_reqs == 0 && s.num_used_pages == 0 && s.num_leaked_pages == 0;
    });
  }

  TestLoop loop_;
  NodeLinkOptions options_;
  std::unique_ptr<PrefillNode> node_;
};

// 200 KB of brackets instead of a hello, before and after a challenge.
TEST_F(PrefillNodeTest, ADeepHelloEndsItsConnectionAlone) {
  start();
  const std::string deep(200'000, '[');
  for (const std::string& json :
       {deep, "{\"epoch\": " + deep + std::string(200'000, ']') + ", \"facts\": []}",
        std::string(10'000, '[') + std::string(10'000, ']')}) {
    const Stranger first(port());
    first.send(kv_frame(KvFrameType::kHello, 0, 0, std::string_view(json)));
    EXPECT_TRUE(first.is_ended_within(20));
    auto socket = connect_to(port());
    ASSERT_TRUE(socket.ok());
    ASSERT_TRUE((*socket)
                    ->send(kv_frame(KvFrameType::kChallenge, 0, 0,
                                    std::string_view(encode_challenge({.nonce = random_nonce()}))))
                    .ok());
    ASSERT_TRUE((*socket)->receive({.stage = KvStage::kChallenge}, in_seconds(20)).ok());
    static_cast<void>((*socket)->send(kv_frame(KvFrameType::kHello, 0, 0, std::string(32, '\0') + json)));
    const auto reply = (*socket)->receive({.stage = KvStage::kHello}, in_seconds(20));
    if (reply.ok()) {
      EXPECT_EQ(reply->header.type, KvFrameType::kFailed);
    }
  }
  expect_works();
}

// A deeply nested request after a valid hello: its room fails, the connection stays open.
TEST_F(PrefillNodeTest, ADeepRequestFailsItsRoomAlone) {
  start();
  auto guest = greet();
  ASSERT_TRUE(guest.ok()) << guest.status().to_string();
  const std::string deep = std::string(1 << 20, '[') + std::string(1 << 20, ']');
  for (const std::string& json : {deep, "{\"input_ids\": " + deep + "}"}) {
    ASSERT_TRUE(guest->send(KvFrameType::kPrefill, 7, json).ok());
    const auto reply = guest->receive();
    ASSERT_TRUE(reply.ok()) << reply.status().to_string();
    const Status failure = decode_failure(reply->payload);
    EXPECT_EQ(failure.code(), StatusCode::kDataLoss);
    EXPECT_LT(failure.message().size(), 200u);
  }
  ASSERT_TRUE(guest->send(KvFrameType::kPrefill, 8, prefill_payload({1, 2})).ok());
  EXPECT_EQ(guest->receive()->header.type, KvFrameType::kFirstToken);
}

TEST_F(PrefillNodeTest, ASlowHelloIsEnded) {
  start({.timeout_seconds = 0.3});
  std::vector<Stranger> strangers;
  for (int i = 0; i < 4; ++i) strangers.emplace_back(port());
  const std::vector<uint8_t> frame =
      kv_frame(KvFrameType::kChallenge, 0, 0, std::string_view(encode_challenge({.nonce = random_nonce()})));
  strangers[1].send(std::string_view(reinterpret_cast<const char*>(frame.data()), 20));
  strangers[2].send(std::string_view(reinterpret_cast<const char*>(frame.data()), frame.size() - 1));
  strangers[3].send(frame);  // its hello never follows
  for (const Stranger& stranger : strangers) EXPECT_TRUE(stranger.is_ended_within(20));
  EXPECT_TRUE(eventually([&] { return node_->num_connections() == 0; }));
}

// After the hello, each frame has a deadline that starts at its first byte. There is no deadline between
// frames.
TEST_F(PrefillNodeTest, ADrippedRequestEndsItsConnectionAndItsRooms) {
  start({.timeout_seconds = 0.3});
  auto guest = greet();
  ASSERT_TRUE(guest.ok());
  ASSERT_TRUE(guest->send(KvFrameType::kPrefill, 1, prefill_payload({5, 6, 7})).ok());
  ASSERT_EQ(guest->receive()->header.type, KvFrameType::kFirstToken);
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  EXPECT_EQ(node_->num_connections(), 1) << "an idle connection was closed";
  const std::vector<uint8_t> frame = kv_frame(KvFrameType::kRelease, guest->epoch, 9, std::string_view());
  ASSERT_TRUE(guest->socket->send(std::span(frame).first(39)).ok());
  EXPECT_EQ(guest->receive().status().code(), StatusCode::kUnavailable);
  EXPECT_TRUE(eventually([&] { return node_->num_connections() == 0; }));
  EXPECT_TRUE(is_empty());
}

// Ten times as many strangers connect as there are connection slots, and a decode node still gets through.
TEST_F(PrefillNodeTest, AFloodOfStrangersIsBounded) {
  start();
  const size_t most = 2 * PrefillNode::kMaxGreeting + static_cast<size_t>(options_.max_connections);
  std::vector<Stranger> strangers;
  for (size_t i = 0; i < 10 * PrefillNode::kMaxGreeting; ++i) {
    strangers.emplace_back(port());
    EXPECT_LE(static_cast<size_t>(node_->num_connections()), most);
    if (i % 40 == 0) expect_works();
  }
  EXPECT_TRUE(
      eventually([&] { return static_cast<size_t>(node_->num_connections()) <= PrefillNode::kMaxGreeting; }));
  EXPECT_TRUE(strangers.front().is_ended_within(20)) << "the oldest connection was not closed first";
  expect_works();
}

// The last stranger displaces the one checked here, so that one is closed only after every interval that
// follows the burst.
TEST_F(PrefillNodeTest, AFloodOfStrangersIsAcceptedSlowly) {
  start();
  constexpr size_t kNumPaced = 100, kNum = PrefillNode::kAcceptBurst + kNumPaced;
  const auto begin = std::chrono::steady_clock::now();
  std::vector<Stranger> strangers;
  for (size_t i = 0; i < kNum; ++i) strangers.emplace_back(port());
  EXPECT_TRUE(strangers[kNum - PrefillNode::kMaxGreeting - 1].is_ended_within(20));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, (kNumPaced - 2) * PrefillNode::kAcceptInterval);
  expect_works();
}

// A new connection replaces a greeted connection without rooms, but never one with rooms.
TEST_F(PrefillNodeTest, IdleConnectionsMakePlace) {
  start({.max_connections = 2});
  auto busy = greet(), idle = greet();
  ASSERT_TRUE(busy.ok() && idle.ok());
  ASSERT_TRUE(busy->send(KvFrameType::kPrefill, 1, prefill_payload({5, 6, 7})).ok());
  ASSERT_EQ(busy->receive()->header.type, KvFrameType::kFirstToken);
  auto third = greet();
  ASSERT_TRUE(third.ok()) << third.status().to_string();
  EXPECT_EQ(idle->receive().status().code(), StatusCode::kUnavailable)
      << "the idle connection was not the one closed";
  ASSERT_TRUE(third->send(KvFrameType::kPrefill, 1, prefill_payload({5, 6, 7})).ok());
  ASSERT_EQ(third->receive()->header.type, KvFrameType::kFirstToken);
  const Status full = greet().status();
  EXPECT_EQ(full.code(), StatusCode::kUnavailable);
  EXPECT_NE(full.message().find("--disaggregation-max-connections"), std::string::npos) << full.message();
  ASSERT_TRUE(busy->send(KvFrameType::kRelease, 1, {}).ok());
  EXPECT_TRUE(eventually([&] { return greet().ok(); })) << "its slot is not free again";
}

TEST_F(PrefillNodeTest, OnlyTheSecretOpensIt) {
  start({.secret = secret_of("correct horse battery staple")});
  expect_works();
  const auto right = options_.secret;
  for (const auto& wrong : {secret_of("another secret, as long"), std::make_shared<const NodeSecret>()}) {
    options_.secret = wrong;
    const Status status = greet().status();
    EXPECT_EQ(status.code(), StatusCode::kUnsupported) << status.to_string();
    EXPECT_NE(status.message().find("--disaggregation-secret-file"), std::string::npos) << status.message();
  }
  options_.secret = right;
  expect_works();
}

// If no thread can be created for a connection, for example under a process limit, the node closes the
// connection and keeps running.
TEST_F(PrefillNodeTest, AConnectionWithoutAThreadIsClosed) {
  start();
  pthread_attr_t before, huge;
  ASSERT_EQ(pthread_getattr_default_np(&before), 0);
  pthread_attr_init(&huge);
  ASSERT_EQ(pthread_attr_setstacksize(&huge, size_t{1} << 46), 0);
  ASSERT_EQ(pthread_setattr_default_np(&huge), 0);  // no new thread can have such a stack
  for (int i = 0; i < 3; ++i) {
    const Stranger stranger(port());
    EXPECT_TRUE(stranger.is_ended_within(20));
  }
  ASSERT_EQ(pthread_setattr_default_np(&before), 0);
  pthread_attr_destroy(&huge);
  expect_works();
}

// If a peer sends failing requests and never reads, the memory for replies and the duration of a send are
// bounded.
TEST_F(PrefillNodeTest, APeerThatNeverReadsIsEnded) {
  start({.timeout_seconds = 0.5});
  auto guest = greet();
  ASSERT_TRUE(guest.ok());
  for (uint64_t room = 1; guest->send(KvFrameType::kPrefill, room, "[]").ok() && room < 500'000; ++room) {
  }
  EXPECT_TRUE(eventually([&] { return node_->num_connections() == 0; }));
  expect_works();
}

TEST_F(PrefillNodeTest, PagesAreTakenOnce) {
  start();
  auto guest = greet();
  ASSERT_TRUE(guest.ok());
  ASSERT_TRUE(guest->send(KvFrameType::kPrefill, 1, prefill_payload({5, 6, 7})).ok());
  ASSERT_EQ(guest->receive()->header.type, KvFrameType::kFirstToken);
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(guest->send(KvFrameType::kTake, 1, std::string(8, '\0')).ok());
  Status status;
  while (status.ok())
    status = guest->socket
                 ->receive({.stage = KvStage::kToDecode, .epoch = guest->epoch, .max_page_bytes = 1 << 20},
                           in_seconds(20))
                 .status();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.to_string();
  EXPECT_TRUE(is_empty());
}

}  // namespace
}  // namespace fp4moe
