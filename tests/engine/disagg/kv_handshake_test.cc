// The hello exchange succeeds if both nodes have the same secret or neither has one. Otherwise both nodes
// refuse it with the reason.
#include "engine/disagg/kv_handshake.h"

#include <gtest/gtest.h>

#include <future>

#include "engine/test_peer.h"

namespace fp4moe {
namespace {

constexpr uint64_t kEpoch = 77;
const KvHello kPrefillHello{kEpoch, {{"model", "m"}, {"--page-size", "16"}}};
const KvHello kDecodeHello{0, {{"model", "m"}, {"--page-size", "16"}}};

struct Outcome {
  Status prefill;  // the prefill node's result
  Result<KvHello> decode = Status();
};

Outcome greet(const NodeSecret& prefill_secret, const NodeSecret& decode_secret,
              const KvHello& decode_hello = kDecodeHello, const Status& admitted = {}) {
  TestPort port;
  Outcome outcome;
  auto prefill = std::async(std::launch::async, [&] {
    const auto socket = port.accept();
    return greet_decode_node(*socket, kPrefillHello, prefill_secret, in_seconds(20),
                             [&] { return admitted; });
  });
  auto socket = connect_to(port.port());
  EXPECT_TRUE(socket.ok());
  outcome.decode = greet_prefill_node(**socket, decode_hello, decode_secret, in_seconds(20));
  outcome.prefill = prefill.get();
  return outcome;
}

void expect_refused(const Outcome& outcome, const std::string& word) {
  for (const Status& status : {outcome.prefill, outcome.decode.status()}) {
    EXPECT_EQ(status.code(), StatusCode::kUnsupported) << status.to_string();
    EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
    EXPECT_EQ(status.message().find("correct horse"), std::string::npos) << "the secret is in the message";
  }
}

TEST(KvHandshake, NodesWithTheSameSecretOrNoneAgree) {
  const auto secret = secret_of("correct horse battery staple");
  for (const auto& one : {secret, std::make_shared<const NodeSecret>()}) {
    const Outcome outcome = greet(*one, *one);
    EXPECT_TRUE(outcome.prefill.ok()) << outcome.prefill.to_string();
    ASSERT_TRUE(outcome.decode.ok()) << outcome.decode.status().to_string();
    EXPECT_EQ(outcome.decode->epoch, kEpoch);
    EXPECT_EQ(outcome.decode->facts, kPrefillHello.facts);
  }
}

TEST(KvHandshake, AnotherSecretOrNoneIsRefusedOnBothSides) {
  const auto secret = secret_of("correct horse battery staple");
  const auto other = secret_of("correct horse battery stapler");
  expect_refused(greet(*secret, *other), "both need the same --disaggregation-secret-file");
  expect_refused(greet(*secret, NodeSecret()), "--disaggregation-secret-file");
  expect_refused(greet(NodeSecret(), *secret), "--disaggregation-secret-file");
}

TEST(KvHandshake, DifferencesAndRefusalsReachTheDecodeNode) {
  const KvHello other{0, {{"model", "m"}, {"--page-size", "32"}}};
  expect_refused(greet(NodeSecret(), NodeSecret(), other),
                 "--page-size is 16 on the prefill node and 32 on the decode node");
  const Outcome full = greet(NodeSecret(), NodeSecret(), kDecodeHello, unavailable("no place left"));
  EXPECT_EQ(full.prefill.code(), StatusCode::kUnavailable);
  EXPECT_EQ(full.decode.status().message(), "no place left");
}

// A hello without a valid proof is not parsed: the bytes after the proof make no difference.
TEST(KvHandshake, NothingIsParsedBeforeTheProof) {
  const auto secret = secret_of("correct horse battery staple");
  const KvNonces nonces{random_nonce(), random_nonce()};
  std::string payload = seal_hello(kDecodeHello, *secret, NodeRole::kDecode, nonces);
  const auto bytes = [&] {
    return std::span(reinterpret_cast<const uint8_t*>(payload.data()), payload.size());
  };
  EXPECT_TRUE(open_hello(bytes(), *secret, NodeRole::kDecode, nonces).ok());
  EXPECT_EQ(open_hello(bytes(), *secret, NodeRole::kPrefill, nonces).status().code(),
            StatusCode::kUnsupported);
  EXPECT_EQ(open_hello(bytes(), *secret, NodeRole::kDecode, {nonces.decode, nonces.prefill}).status().code(),
            StatusCode::kUnsupported);
  payload.resize(sizeof(NodeProof));
  payload += std::string(10'000, '[');
  EXPECT_EQ(open_hello(bytes(), *secret, NodeRole::kDecode, nonces).status().code(),
            StatusCode::kUnsupported);
  EXPECT_EQ(open_hello(bytes(), NodeSecret(), NodeRole::kDecode, nonces).status().code(),
            StatusCode::kDataLoss);
  payload.resize(sizeof(NodeProof) - 1);
  EXPECT_EQ(open_hello(bytes(), *secret, NodeRole::kDecode, nonces).status().code(), StatusCode::kDataLoss);
}

// A proof recorded in one connection is refused in another one, whose nonces differ.
TEST(KvHandshake, ReflectedAndReplayedProofsAreRefused) {
  const auto secret = secret_of("correct horse battery staple");
  TestPort port;
  std::string recorded;
  for (const bool replays : {false, true}) {
    auto prefill = std::async(std::launch::async, [&] {
      const auto socket = port.accept();
      return greet_decode_node(*socket, kPrefillHello, *secret, in_seconds(20), [] { return Status(); });
    });
    auto socket = connect_to(port.port());
    ASSERT_TRUE(socket.ok());
    KvChallenge ours{.has_secret = 1};
    ours.nonce.fill(9);
    const auto send = [&](KvFrameType type, const std::string& text) {
      return (*socket)->send(kv_frame(type, 0, 0, std::string_view(text)));
    };
    ASSERT_TRUE(send(KvFrameType::kChallenge, encode_challenge(ours)).ok());
    const auto theirs = (*socket)->receive({.stage = KvStage::kChallenge}, in_seconds(20));
    ASSERT_TRUE(theirs.ok());
    const KvNonces nonces{decode_challenge(theirs->payload)->nonce, ours.nonce};
    // The honest proof of the first connection is recorded and replayed in the second.
    if (!replays) recorded = seal_hello(kDecodeHello, *secret, NodeRole::kDecode, nonces);
    ASSERT_TRUE(send(KvFrameType::kHello, recorded).ok());
    const Status status = prefill.get();
    EXPECT_EQ(status.ok(), !replays) << status.to_string();
  }
}

// Refuses frames that are missing, out of order, or of another protocol version.
TEST(KvHandshake, StrangersAreRefused) {
  const auto greeted = [](const std::function<void(KvSocket&)>& stranger) {
    TestPort port;
    auto prefill = std::async(std::launch::async, [&] {
      const auto socket = port.accept();
      return greet_decode_node(*socket, kPrefillHello, NodeSecret(), in_seconds(0.5),
                               [] { return Status(); });
    });
    auto socket = connect_to(port.port());
    EXPECT_TRUE(socket.ok());
    stranger(**socket);
    return prefill.get();
  };
  const Status silent = greeted([](KvSocket&) { std::this_thread::sleep_for(std::chrono::seconds(1)); });
  EXPECT_EQ(silent.code(), StatusCode::kUnavailable) << silent.to_string();
  const Status hello_first = greeted([](KvSocket& socket) {
    static_cast<void>(
        socket.send(kv_frame(KvFrameType::kHello, 0, 0, std::string_view(encode_kv_hello(kDecodeHello)))));
  });
  EXPECT_EQ(hello_first.code(), StatusCode::kDataLoss) << hello_first.to_string();
  const Status newer = greeted([](KvSocket& socket) {
    KvChallenge challenge{.protocol = kKvProtocol + 1};
    static_cast<void>(
        socket.send(kv_frame(KvFrameType::kChallenge, 0, 0, std::string_view(encode_challenge(challenge)))));
    const auto reply = socket.receive({.stage = KvStage::kChallenge}, in_seconds(20));
    ASSERT_TRUE(reply.ok());
    EXPECT_EQ(reply->header.type, KvFrameType::kFailed);
  });
  const std::string said =
      "the protocol version is " + std::to_string(kKvProtocol + 1) + " on the decode node";
  EXPECT_NE(newer.message().find(said), std::string::npos) << newer.message();
}

}  // namespace
}  // namespace fp4moe
