// A prefill node's port under attack: strangers can occupy only a bounded number of connections, threads and
// bytes, and a decode node is still served.
#include "engine/disagg/prefill_node.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <utility>

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
      return socket->receive({.stage = KvStage::kToDecode, .epoch = epoch, .max_page_bytes = 1 << 20},
                             in_seconds(seconds));
    }
    Status take(uint64_t room, int64_t first) {
      return send(KvFrameType::kTake, room, {reinterpret_cast<const char*>(&first), sizeof first});
    }
    // Receives the pages [first, end) of 4 tokens each of a prompt that begins with `ids`, and checks that
    // they hold its tokens. first_token: also receives the first token, which must precede the last page.
    void expect_pages(int64_t first, int64_t end, std::span<const int32_t> ids, int64_t take = 1,
                      bool first_token = false) {
      for (int64_t page = first; page < end; ++page) {
        auto frame = receive();
        if (frame.ok() && frame->header.type == KvFrameType::kFirstToken && std::exchange(first_token, false))
          frame = receive();
        EXPECT_FALSE(first_token && page + 1 == end) << "the last page came first";
        ASSERT_TRUE(frame.ok()) << page << ": " << frame.status().to_string();
        ASSERT_EQ(frame->header.type, KvFrameType::kPage) << page;
        KvPageHeader header;
        std::memcpy(&header, frame->payload.data(), sizeof header);
        EXPECT_EQ(header.index, page);
        EXPECT_EQ(header.take, take);
        std::vector<float> numbers((frame->payload.size() - sizeof header) / sizeof(float));
        std::memcpy(numbers.data(), frame->payload.data() + sizeof header, numbers.size() * sizeof(float));
        for (int64_t i = 0; i < header.num_tokens; ++i)
          EXPECT_NE(std::ranges::find(numbers, static_cast<float>(ids[static_cast<size_t>(4 * page + i)])),
                    numbers.end())
              << "token " << i << " of page " << page;
      }
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

// ---- pages that leave before their prompt is complete ---------------------------------------------

std::vector<int32_t> ids_from(int32_t first, int32_t count) {
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < count; ++i) ids.push_back(first + i);
  return ids;
}

// A node whose engine computes 16 tokens in a step and is held in one of its steps. The parameter: the
// executor samples, so that the loop runs a step ahead.
class HeldPrefillNode : public PrefillNodeTest, public testing::WithParamInterface<bool> {
 protected:
  void start_held(int num_steps) {
    held_.emplace(hashed_logits, LoopShape{.samples = GetParam()}, gate_.hook(num_steps));
    auto made = PrefillNode::make(**held_, kHello, "127.0.0.1", 0);
    ASSERT_TRUE(made.ok()) << made.status().to_string();
    node_ = std::move(*made);
    guest_ = *greet();
  }
  void TearDown() override {
    gate_.open();
    EXPECT_TRUE(eventually([&] {
      const EngineStats s = (*held_)->stats();
      return s.num_held_reqs == 0 && s.num_used_pages == 0 && s.num_leaked_pages == 0 &&
             s.num_queue_reqs == 0;
    }));
    node_.reset();
  }
  // The pages that are there while step n, counted from 0 on, is computed: the step before may be in flight.
  int64_t pages_in_step(int64_t n) const { return 4 * (GetParam() ? n - 1 : n); }
  Status ask(uint64_t room, const std::vector<int32_t>& ids) {
    return guest_.send(KvFrameType::kPrefill, room, prefill_payload(ids));
  }
  // Asks for a prompt in room 1, takes its pages from `first` on, and receives those that are there while
  // step n is computed, which waits for gate_.
  void receive_a_part(int n, const std::vector<int32_t>& ids, int64_t first) {
    ASSERT_NO_FATAL_FAILURE(start_held(n));
    ASSERT_TRUE(ask(1, ids).ok());
    ASSERT_TRUE(guest_.take(1, first).ok());
    gate_.wait_until_reached();
    guest_.expect_pages(first, pages_in_step(n), ids);
  }
  void expect_first_token() { ASSERT_EQ(guest_.receive()->header.type, KvFrameType::kFirstToken); }

  Gate gate_;
  std::optional<TestLoop> held_;
  Guest guest_;
};
INSTANTIATE_TEST_SUITE_P(Samples, HeldPrefillNode, testing::Bool());

TEST_P(HeldPrefillNode, PagesLeaveBeforeThePromptIsComplete) {
  const std::vector<int32_t> ids = ids_from(3, 42);
  ASSERT_NO_FATAL_FAILURE(receive_a_part(2, ids, 2));
  EXPECT_EQ((*held_)->stats().num_prompts_total, 0);
  gate_.open();
  guest_.expect_pages(pages_in_step(2), 11, ids, 1, /*first_token=*/true);
  ASSERT_TRUE(guest_.send(KvFrameType::kRelease, 1, {}).ok());
}

// The take can come at any time; pages are sent again if they are taken again.
TEST_P(HeldPrefillNode, ALaterTakeReplacesTheEarlierOne) {
  const std::vector<int32_t> ids = ids_from(3, 40);
  ASSERT_NO_FATAL_FAILURE(receive_a_part(2, ids, 0));
  ASSERT_TRUE(guest_.take(1, 1).ok());
  guest_.expect_pages(1, pages_in_step(2), ids, /*take=*/2);
  gate_.open();
  guest_.expect_pages(pages_in_step(2), 10, ids, 2, /*first_token=*/true);
  ASSERT_TRUE(guest_.take(1, 9).ok());
  guest_.expect_pages(9, 10, ids, 3);
  ASSERT_TRUE(guest_.send(KvFrameType::kRelease, 1, {}).ok());
}

TEST_P(HeldPrefillNode, CachedPagesLeaveAtOnce) {
  ASSERT_NO_FATAL_FAILURE(start_held(3));
  ASSERT_TRUE(ask(1, ids_from(3, 34)).ok());
  expect_first_token();
  ASSERT_TRUE(guest_.send(KvFrameType::kRelease, 1, {}).ok());
  ASSERT_TRUE(eventually([&] { return (*held_)->stats().num_held_reqs == 0; }));
  const std::vector<int32_t> ids = ids_from(3, 60);
  ASSERT_TRUE(ask(2, ids).ok());
  ASSERT_TRUE(guest_.take(2, 0).ok());
  gate_.wait_until_reached();
  if (!GetParam()) guest_.expect_pages(0, 8, ids);
  EXPECT_EQ((*held_)->stats().num_prompts_total, 1);
  gate_.open();
  guest_.expect_pages(GetParam() ? 0 : 8, 15, ids, 1, /*first_token=*/true);
  ASSERT_TRUE(guest_.send(KvFrameType::kRelease, 2, {}).ok());
}

// A first token passes the pages of other prompts, and a prompt that waits delays no other.
TEST_P(HeldPrefillNode, PromptsDoNotWaitForEachOther) {
  const std::vector<int32_t> ids = ids_from(3, 100), other = ids_from(150, 6);
  ASSERT_NO_FATAL_FAILURE(receive_a_part(3, ids, 0));
  ASSERT_TRUE(ask(2, other).ok());
  ASSERT_TRUE(guest_.take(2, 0).ok());
  ASSERT_TRUE(eventually([&] { return (*held_)->stats().num_queue_reqs == 1; }));
  gate_.open();
  int64_t next[3] = {0, pages_in_step(3), 0};
  bool has_token[3] = {};
  while (next[1] < 25 || next[2] < 2) {
    const auto frame = guest_.receive();
    ASSERT_TRUE(frame.ok()) << frame.status().to_string();
    const uint64_t room = frame->header.room;
    if (frame->header.type == KvFrameType::kFirstToken) {
      has_token[room] = true;
      continue;
    }
    KvPageHeader header;
    std::memcpy(&header, frame->payload.data(), sizeof header);
    EXPECT_EQ(header.index, next[room]++);
    EXPECT_TRUE(has_token[room] || next[room] < (room == 1 ? 25 : 2)) << "the last page came first";
    EXPECT_TRUE(room == 2 || next[1] < 25 || has_token[2]) << "the short prompt came last";
  }
  for (const uint64_t room : {1, 2}) ASSERT_TRUE(guest_.send(KvFrameType::kRelease, room, {}).ok());
}

// The decode node leaves, releases the room, or vanishes when some pages are there.
TEST_P(HeldPrefillNode, APromptThatIsLeftReturnsItsPages) {
  ASSERT_NO_FATAL_FAILURE(start_held(2));
  for (const uint64_t room : {1, 2}) {
    ASSERT_TRUE(ask(room, ids_from(3 + static_cast<int32_t>(room) * 80, 60)).ok());
    ASSERT_TRUE(guest_.take(room, 0).ok());
  }
  gate_.wait_until_reached();
  ASSERT_TRUE(guest_.send(KvFrameType::kRelease, 1, {}).ok());
  guest_.socket->shut_down();
}

TEST_P(HeldPrefillNode, AFailedStepFailsThePromptsWhosePagesHaveLeft) {
  ASSERT_NO_FATAL_FAILURE(start_held(2));
  const std::vector<int32_t> ids = ids_from(3, 60);
  ASSERT_TRUE(ask(1, ids).ok());
  ASSERT_TRUE(guest_.take(1, 0).ok());
  gate_.wait_until_reached();
  guest_.expect_pages(0, pages_in_step(2), ids);
  held_->executor().fail(internal_error("the device is gone"));
  gate_.open();
  Result<KvFrame> frame = guest_.receive();
  while (frame.ok() && frame->header.type == KvFrameType::kPage) frame = guest_.receive();
  ASSERT_TRUE(frame.ok());
  ASSERT_EQ(frame->header.type, KvFrameType::kFailed);
  EXPECT_NE(decode_failure(frame->payload).message().find("the device is gone"), std::string::npos);
}

// A page beyond the prompt's ends the connection also before the prompt is computed.
TEST_P(HeldPrefillNode, AWrongTakeEndsItsConnection) {
  for (const int64_t first : {int64_t{-1}, int64_t{3}, INT64_MAX}) {
    gate_.open();
    ASSERT_NO_FATAL_FAILURE(start_held(0));
    ASSERT_TRUE(ask(1, ids_from(3, 9)).ok());
    ASSERT_TRUE(guest_.take(1, first).ok());
    Status status;
    while (status.ok()) status = guest_.receive().status();
    EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.to_string();
    node_.reset();
  }
}

}  // namespace
}  // namespace fp4moe
