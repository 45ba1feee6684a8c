// Decode node: it connects only to allowed prefill nodes, and a hostile prefill node cannot exhaust it.
#include "engine/disagg/decode_node.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>

#include "base/log.h"
#include "engine/fake_executor.h"
#include "engine/test_peer.h"
#include "support/eventually.h"

namespace fp4moe {
namespace {

const KvHello kHello{0, {{"model", "m"}}};

class DecodeNodeTest : public testing::Test {
 protected:
  void start(NodeLinkOptions link = {}) {
    DecodeNodeOptions options{.hello = kHello, .max_page_bytes = 4096, .link = std::move(link)};
    node_ = std::make_unique<DecodeNode>(std::move(options), [this](KvEvent event) {
      std::lock_guard lock(mutex_);
      events_.push_back(std::move(event));
      changed_.notify_all();
    });
  }
  void SetUp() override {
    set_log_sink([this](LogLevel, const std::string& line) {
      std::lock_guard lock(mutex_);
      lines_.push_back(line);
    });
  }
  void TearDown() override {
    node_.reset();
    set_log_sink({});
  }
  static Request request_to(const std::string& prefill_node) {
    Request request{.id = "r", .input_ids = {1, 2, 3}, .prefill_node = prefill_node};
    request.sampling.seed = 1;
    return request;
  }
  Result<uint64_t> ask(const std::string& prefill_node) { return node_->ask(request_to(prefill_node)); }
  // Asks the prefill node at `port`, which sends its hello.
  void ask_and_greet(TestPort& port, uint64_t& room, std::unique_ptr<KvSocket>& socket) {
    const Result<uint64_t> asked = ask(port.address());
    ASSERT_TRUE(asked.ok());
    room = *asked;
    socket = port.accept();
    ASSERT_TRUE(
        greet_decode_node(*socket, {7, kHello.facts}, {}, in_seconds(20), [] { return Status(); }).ok());
  }
  KvEvent next_event() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(20), [&] { return !events_.empty(); }));
    if (events_.empty()) return {};
    KvEvent event = std::move(events_.front());
    events_.pop_front();
    return event;
  }
  std::vector<std::string> lines() {
    std::lock_guard lock(mutex_);
    return lines_;
  }
  static Status send(KvSocket& socket, KvFrameType type, uint64_t epoch, uint64_t room,
                     std::string_view payload) {
    return socket.send(kv_frame(type, epoch, room, payload));
  }

  std::unique_ptr<DecodeNode> node_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<KvEvent> events_;
  std::vector<std::string> lines_;
};

// Hosts that are not allowed are neither resolved nor contacted: the named port receives no connection.
TEST_F(DecodeNodeTest, HostsThatAreNotAllowedAreNotContacted) {
  TestPort port;
  start({.allowed_hosts = *AllowedHosts::parse({"prefill-1", "127.0.0.1:1"})});
  for (const std::string& place : {port.address(), std::string("10.0.0.1:8998"), std::string("[::1]:80")}) {
    for (const Status& status : {node_->check(place), ask(place).status()}) {
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_NE(status.message().find("--disaggregation-allowed-hosts"), std::string::npos);
    }
  }
  EXPECT_EQ(node_->num_peers(), 0);
  port.listener().wake();
  EXPECT_EQ(port.listener().accept().event, KvListener::Event::kWoken) << "the decode node connected to it";
}

// A host string of 20 MB or with control characters only causes a short error.
TEST_F(DecodeNodeTest, HostileHostStringsAreRefusedAndForgotten) {
  start();
  for (int i = 0; i < 20; ++i)
    for (const std::string& place : {std::string(20 << 20, 'a' + static_cast<char>(i)) + ":8998",
                                     "a\n\x1b[31m" + std::to_string(i) + ":80"}) {
      const Status status = ask(place).status();
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_LT(status.message().size(), 300u);
      EXPECT_EQ(status.message().find_first_of("\n\x1b"), std::string::npos);
    }
  EXPECT_EQ(node_->num_peers(), 0);
  EXPECT_TRUE(lines().empty());
}

// Failed nodes replace each other in the table; their log lines are rate-limited.
TEST_F(DecodeNodeTest, FailedNodesAreForgottenAndLoggedAtABoundedRate) {
  start({.max_connections = 4});
  const auto begin = KvSocket::Clock::now();
  for (int i = 0; i < 60; ++i) {
    const int port = TestPort().port();  // nothing listens there any more
    const auto room = ask("127.0.0.1:" + std::to_string(port));
    ASSERT_TRUE(room.ok()) << room.status().to_string();
    const KvEvent event = next_event();
    EXPECT_EQ(event.room, *room);
    EXPECT_EQ(event.status.code(), StatusCode::kUnavailable) << event.status.to_string();
    node_->release(*room);
    EXPECT_LE(node_->num_peers(), 4);
  }
  const auto seconds = std::chrono::duration<double>(KvSocket::Clock::now() - begin).count();
  EXPECT_LE(static_cast<double>(lines().size()), 22 + 2 * seconds / 5)
      << "the limit is 20 lines at once, then one line and one count per 5 s";
}

// If all remembered nodes have requests, another node is refused until a slot is free.
TEST_F(DecodeNodeTest, ABusyNodeKeepsItsPlace) {
  start({.max_connections = 1});
  TestPort one, two;
  uint64_t first = 0;
  std::unique_ptr<KvSocket> socket;
  ASSERT_NO_FATAL_FAILURE(ask_and_greet(one, first, socket));
  const Status refused = ask(two.address()).status();
  EXPECT_EQ(refused.code(), StatusCode::kUnavailable);
  EXPECT_NE(refused.message().find("--disaggregation-max-connections"), std::string::npos);
  ASSERT_TRUE(socket->receive({.stage = KvStage::kToPrefill, .epoch = 7}, in_seconds(20)).ok());
  node_->release(first);
  EXPECT_TRUE(eventually([&] { return ask(two.address()).ok(); }));
}

// If a prefill node sends deeply nested JSON, drips bytes or sends frames out of order, its requests fail
// with an error that names the node.
TEST_F(DecodeNodeTest, AHostilePrefillNodeFailsItsOwnRequests) {
  start({.timeout_seconds = 0.5});
  const std::string deep = std::string(200'000, '[') + std::string(200'000, ']');
  const std::vector<std::function<void(KvSocket&)>> attacks = {
      [&](KvSocket& s) { static_cast<void>(send(s, KvFrameType::kHello, 0, 0, deep)); },
      [&](KvSocket& s) { static_cast<void>(send(s, KvFrameType::kFailed, 0, 0, deep.substr(0, 8000))); },
      [&](KvSocket& s) {
        const std::string text =
            "{\"code\": 7, \"message\": \"a\\nb\\u001b[31m" + std::string(9000, 'x') + "\"}";
        static_cast<void>(send(s, KvFrameType::kFailed, 0, 0, text));
      },
      [&](KvSocket& s) {
        static_cast<void>(
            send(s, KvFrameType::kChallenge, 0, 0, encode_challenge({.nonce = random_nonce()})));
        static_cast<void>(send(s, KvFrameType::kHello, 0, 0, std::string(32, '\0') + deep.substr(0, 8000)));
      },
      [&](KvSocket&) { std::this_thread::sleep_for(std::chrono::seconds(1)); },
  };
  for (const auto& attack : attacks) {
    TestPort port;
    const auto room = ask(port.address());
    ASSERT_TRUE(room.ok());
    const auto socket = port.accept();
    attack(*socket);
    const KvEvent event = next_event();
    EXPECT_EQ(event.room, *room);
    EXPECT_EQ(event.status.code(), StatusCode::kUnavailable);
    EXPECT_NE(event.status.message().find(port.address()), std::string::npos);
    EXPECT_LT(event.status.message().size(), 1300u);
    EXPECT_EQ(event.status.message().find_first_of("\n\x1b"), std::string::npos) << event.status.message();
  }
  for (const std::string& line : lines()) EXPECT_EQ(line.find_first_of("\n\x1b"), std::string::npos) << line;
}

TEST_F(DecodeNodeTest, DeepFirstTokensEndTheConnection) {
  start();
  TestPort port;
  uint64_t room = 0;
  std::unique_ptr<KvSocket> socket;
  ASSERT_NO_FATAL_FAILURE(ask_and_greet(port, room, socket));
  const std::string deep = std::string(1 << 20, '[') + std::string(1 << 20, ']');
  ASSERT_TRUE(send(*socket, KvFrameType::kFirstToken, 7, room, "{\"token\": " + deep + "}").ok());
  const KvEvent event = next_event();
  EXPECT_EQ(event.kind, KvEvent::Kind::kFailed);
  EXPECT_NE(event.status.message().find("malformed first token"), std::string::npos)
      << event.status.message();
}

// Pages that have arrived count, although a failure or the connection's end arrives while they are written.
TEST_F(DecodeNodeTest, ARequestWhosePagesHaveArrivedContinues) {
  start();
  for (const bool fails : {false, true}) {
    TestPort port;
    uint64_t room = 0;
    std::unique_ptr<KvSocket> socket;
    ASSERT_NO_FATAL_FAILURE(ask_and_greet(port, room, socket));
    FakeModel model(fake_config(16, {}, 0, /*has_state=*/true));
    FakeExecutor executor(model, LoopShape{.num_slots = 4});
    executor.before_state_copy = [] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); };
    const auto lease = std::make_shared<KvLease>(executor, KvPlace{0, {.full = {0}}, 1}, 4);
    const KvPageShape shape = lease->shape();
    ASSERT_EQ(shape.num_parts(), 2);
    node_->take(room, lease, 0);
    for (const KvFrameType type : {KvFrameType::kPrefill, KvFrameType::kTake})
      EXPECT_EQ(socket->receive({.stage = KvStage::kToPrefill, .epoch = 7}, in_seconds(20))->header.type,
                type);
    const std::string first = encode_first_token({.token = {.token_id = 5}});
    ASSERT_TRUE(send(*socket, KvFrameType::kFirstToken, 7, room, first).ok());
    EXPECT_EQ(next_event().kind, KvEvent::Kind::kFirstToken);
    for (const int64_t part : {0, 1}) {
      const KvPageHeader header{.index = part, .num_tokens = shape.tokens_of(part)};
      std::string payload(reinterpret_cast<const char*>(&header), sizeof header);
      payload.append(static_cast<size_t>(shape.bytes_of(part)), '\x5a');
      ASSERT_TRUE(send(*socket, KvFrameType::kPage, 7, room, payload).ok());
    }
    if (fails) {
      const std::string failure = encode_failure(unavailable("the prompt was held for too long"));
      ASSERT_TRUE(send(*socket, KvFrameType::kFailed, 7, room, failure).ok());
    } else {
      socket->shut_down();
    }
    const KvEvent event = next_event();
    EXPECT_EQ(event.kind, KvEvent::Kind::kArrived) << event.status.to_string();
    EXPECT_EQ(event.room, room);
    std::vector<uint8_t> arrived(static_cast<size_t>(shape.state_bytes));
    executor.before_state_copy = {};
    ASSERT_TRUE(executor.read_state(0, 1, 0, arrived).ok());
    EXPECT_EQ(arrived, std::vector<uint8_t>(arrived.size(), 0x5a));
    node_->release(room);
  }
  std::lock_guard lock(mutex_);
  EXPECT_TRUE(events_.empty());
}

// A fake prefill node that answers a request for pages before it has the first token. The prompt has two
// pages of 4 tokens, which are numbers 2 and 3 of the decode node.
class EarlyTake : public DecodeNodeTest {
 protected:
  void SetUp() override {
    DecodeNodeTest::SetUp();
    start();
    ask_and_greet(port_, room_, socket_);
    EXPECT_EQ(receive().header.type, KvFrameType::kPrefill);
  }
  std::shared_ptr<KvLease> take(int64_t first) {
    auto lease = std::make_shared<KvLease>(executor_, KvPlace{0, {.full = {2, 3}}}, 8);
    node_->take(room_, lease, first);
    const KvFrame frame = receive();
    EXPECT_EQ(frame.header.type, KvFrameType::kTake);
    EXPECT_EQ(*decode_take(frame.payload), first);
    return lease;
  }
  KvFrame receive() {
    auto frame = socket_->receive({.stage = KvStage::kToPrefill, .epoch = 7}, in_seconds(20));
    EXPECT_TRUE(frame.ok()) << frame.status().to_string();
    return frame.ok() ? std::move(*frame) : KvFrame{};
  }
  void send_page(int64_t index, int64_t take, char content) {
    const KvPageHeader header{.index = index, .num_tokens = 4, .take = take};
    std::string payload(reinterpret_cast<const char*>(&header), sizeof header);
    payload.append(static_cast<size_t>(4 * executor_.kv_token_bytes()), content);
    EXPECT_TRUE(send(*socket_, KvFrameType::kPage, 7, room_, payload).ok());
  }
  void send_first_token() {
    EXPECT_TRUE(
        send(*socket_, KvFrameType::kFirstToken, 7, room_, encode_first_token({.token = {.token_id = 5}}))
            .ok());
  }
  bool has_written(int64_t num_pages) {
    const int64_t num_bytes = num_pages * 4 * executor_.kv_token_bytes();
    return eventually([&] { return node_->traffic().num_bytes == num_bytes; });
  }
  char content_of(int32_t page) {
    std::vector<uint8_t> bytes(static_cast<size_t>(4 * executor_.kv_token_bytes()));
    EXPECT_TRUE(executor_.read_page(0, page, 4, bytes.data()).ok());
    return static_cast<char>(bytes[0]);
  }

  TestPort port_;
  uint64_t room_ = 0;
  std::unique_ptr<KvSocket> socket_;
  FakeModel model_{fake_config(16)};
  FakeExecutor executor_{model_, LoopShape{}};
};

TEST_F(EarlyTake, PagesArriveBeforeTheFirstToken) {
  const auto lease = take(0);
  send_page(0, 1, 'a');
  ASSERT_TRUE(has_written(1));
  EXPECT_EQ(content_of(2), 'a');
  send_first_token();
  EXPECT_EQ(next_event().kind, KvEvent::Kind::kFirstToken);
  send_page(1, 1, 'b');
  const KvEvent event = next_event();
  EXPECT_EQ(event.kind, KvEvent::Kind::kArrived);
  EXPECT_EQ(event.pages, lease);
  EXPECT_EQ(content_of(3), 'b');
  EXPECT_EQ(receive().header.type, KvFrameType::kRelease);
}

// The pages were given back: those on their way are dropped, and the room stays until they are taken again.
TEST_F(EarlyTake, PagesOfAnEndedLeaseAreDropped) {
  const auto ended = take(0);
  send_page(0, 1, 'a');
  ASSERT_TRUE(has_written(1));
  EXPECT_EQ(content_of(2), 'a');
  ended->end();
  send_first_token();
  EXPECT_EQ(next_event().kind, KvEvent::Kind::kFirstToken);
  send_page(1, 1, 'x');
  const auto lease = take(0);
  send_page(0, 1, 'x');
  send_page(0, 2, 'c');
  send_page(1, 1, 'x');
  send_page(1, 2, 'd');
  const KvEvent event = next_event();
  EXPECT_EQ(event.kind, KvEvent::Kind::kArrived) << event.status.to_string();
  EXPECT_EQ(event.pages, lease);
  EXPECT_EQ(content_of(2), 'c');
  EXPECT_EQ(content_of(3), 'd');
  EXPECT_EQ(receive().header.type, KvFrameType::kRelease);
}

TEST_F(EarlyTake, TheLastPageDoesNotComeFirst) {
  take(0);
  send_page(0, 1, 'a');
  send_page(1, 1, 'b');
  const KvEvent event = next_event();
  EXPECT_EQ(event.kind, KvEvent::Kind::kFailed);
  EXPECT_NE(event.status.message().find("received the last page before the first token"), std::string::npos)
      << event.status.message();
}

TEST_F(EarlyTake, PagesThatWereNotTakenEndTheConnection) {
  for (const auto& [index, number] : {std::pair(1, 1), {0, 0}, {0, -1}, {0, 2}}) {
    take(0);
    send_page(index, number, 'x');
    const KvEvent event = next_event();
    EXPECT_EQ(event.kind, KvEvent::Kind::kFailed);
    EXPECT_NE(event.status.message().find(index == 1 ? "received page 1, expected page 0"
                                                     : "received a page for request " +
                                                           std::to_string(number) + " of 1"),
              std::string::npos)
        << event.status.message();
    if (index == 0 && number == 2) break;
    ask_and_greet(port_, room_, socket_);
    EXPECT_EQ(receive().header.type, KvFrameType::kPrefill);
  }
}

// The request fails unless both nodes prove that they know the secret.
TEST_F(DecodeNodeTest, APrefillNodeWithoutTheSecretIsRefused) {
  start({.secret = secret_of("correct horse battery staple")});
  for (const auto& theirs : {secret_of("another secret, as long"), std::make_shared<const NodeSecret>()}) {
    TestPort port;
    ASSERT_TRUE(ask(port.address()).ok());
    const auto socket = port.accept();
    EXPECT_FALSE(
        greet_decode_node(*socket, {7, kHello.facts}, *theirs, in_seconds(20), [] { return Status(); }).ok());
    const KvEvent event = next_event();
    EXPECT_NE(event.status.message().find("--disaggregation-secret-file"), std::string::npos)
        << event.status.message();
  }
}

// If no thread can be created for a connection, the request fails and the caller (the engine's thread)
// continues.
TEST_F(DecodeNodeTest, ARequestWithoutAThreadFails) {
  start();
  TestPort port;
  pthread_attr_t before, huge;
  ASSERT_EQ(pthread_getattr_default_np(&before), 0);
  pthread_attr_init(&huge);
  ASSERT_EQ(pthread_attr_setstacksize(&huge, size_t{1} << 46), 0);
  ASSERT_EQ(pthread_setattr_default_np(&huge), 0);  // no new thread can have such a stack
  const Status status = ask(port.address()).status();
  ASSERT_EQ(pthread_setattr_default_np(&before), 0);
  pthread_attr_destroy(&huge);
  EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.to_string();
  EXPECT_NE(status.message().find("no thread"), std::string::npos) << status.message();
  EXPECT_TRUE(ask(port.address()).ok());
}

}  // namespace
}  // namespace fp4moe
