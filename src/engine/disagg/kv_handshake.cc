#include "engine/disagg/kv_handshake.h"

#include <algorithm>
#include <string_view>

#include "base/check.h"

namespace fp4moe {
namespace {

constexpr const char* kSecretFile = "--disaggregation-secret-file";

std::span<const uint8_t> bytes_of(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

const char* name_of(NodeRole role) { return role == NodeRole::kPrefill ? "prefill node" : "decode node"; }

Status send_text(KvSocket& socket, KvFrameType type, const std::string& text) {
  return socket.send(kv_frame(type, 0, 0, std::string_view(text)));
}

// Receives the frame that the stage expects. A kFailed frame becomes the error that it carries.
Result<KvFrame> receive(KvSocket& socket, KvStage stage, KvSocket::Clock::time_point end_by) {
  FP4MOE_ASSIGN_OR_RETURN(KvFrame frame, socket.receive({.stage = stage}, end_by));
  if (frame.header.type == KvFrameType::kFailed) return decode_failure(frame.payload);
  return frame;
}

KvChallenge challenge_of(const NodeSecret& secret) {
  return {.has_secret = secret.is_set() ? 1u : 0u, .nonce = random_nonce()};
}

// Both nodes must have the same protocol version, and either both or neither must have a secret.
Status compare_challenges(const KvChallenge& ours, const KvChallenge& theirs, NodeRole their_role) {
  const std::string name = name_of(their_role);
  if (theirs.protocol != ours.protocol)
    return unsupported("the protocol version is " + std::to_string(theirs.protocol) + " on the " + name +
                       " and " + std::to_string(ours.protocol) + " on this node; they must be the same");
  if ((theirs.has_secret != 0) == (ours.has_secret != 0)) return {};
  return unsupported(
      ours.has_secret != 0
          ? "the " + name + " has no secret but this node has one; both need the same " + kSecretFile
          : "the " + name + " has a secret but this node has none; both need the same " + kSecretFile);
}

Status respond_to_decode_node(KvSocket& socket, const KvHello& ours, const NodeSecret& secret,
                              KvSocket::Clock::time_point end_by, const std::function<Status()>& admit) {
  FP4MOE_ASSIGN_OR_RETURN(const KvFrame first, receive(socket, KvStage::kChallenge, end_by));
  FP4MOE_ASSIGN_OR_RETURN(const KvChallenge theirs, decode_challenge(first.payload));
  const KvChallenge challenge = challenge_of(secret);
  FP4MOE_RETURN_IF_ERROR(compare_challenges(challenge, theirs, NodeRole::kDecode));
  FP4MOE_RETURN_IF_ERROR(send_text(socket, KvFrameType::kChallenge, encode_challenge(challenge)));
  const KvNonces nonces{.prefill = challenge.nonce, .decode = theirs.nonce};
  FP4MOE_ASSIGN_OR_RETURN(const KvFrame second, receive(socket, KvStage::kHello, end_by));
  FP4MOE_ASSIGN_OR_RETURN(const KvHello hello, open_hello(second.payload, secret, NodeRole::kDecode, nonces));
  FP4MOE_RETURN_IF_ERROR(compare_hello(ours, hello));
  FP4MOE_RETURN_IF_ERROR(admit());
  return send_text(socket, KvFrameType::kHello, seal_hello(ours, secret, NodeRole::kPrefill, nonces));
}

}  // namespace

std::string seal_hello(const KvHello& hello, const NodeSecret& secret, NodeRole role,
                       const KvNonces& nonces) {
  const std::string text = encode_kv_hello(hello);
  const NodeProof proof = secret.prove(role, nonces.prefill, nonces.decode, bytes_of(text));
  return std::string(proof.begin(), proof.end()) + text;
}

Result<KvHello> open_hello(std::span<const uint8_t> payload, const NodeSecret& secret, NodeRole role,
                           const KvNonces& nonces) {
  NodeProof proof;
  if (payload.size() < proof.size())
    return data_loss("a hello of " + std::to_string(payload.size()) + " bytes; expected at least " +
                     std::to_string(proof.size()));
  std::ranges::copy(payload.first(proof.size()), proof.begin());
  const std::span<const uint8_t> text = payload.subspan(proof.size());
  if (!secret.verify(proof, role, nonces.prefill, nonces.decode, text))
    return unsupported(std::string("the ") + name_of(role) +
                       " did not prove this node's secret; both need the " + "same " + kSecretFile);
  return decode_kv_hello(text);
}

Result<KvHello> greet_prefill_node(KvSocket& socket, const KvHello& ours, const NodeSecret& secret,
                                   KvSocket::Clock::time_point end_by) {
  const KvChallenge challenge = challenge_of(secret);
  FP4MOE_RETURN_IF_ERROR(send_text(socket, KvFrameType::kChallenge, encode_challenge(challenge)));
  FP4MOE_ASSIGN_OR_RETURN(const KvFrame first, receive(socket, KvStage::kChallenge, end_by));
  FP4MOE_ASSIGN_OR_RETURN(const KvChallenge theirs, decode_challenge(first.payload));
  FP4MOE_RETURN_IF_ERROR(compare_challenges(challenge, theirs, NodeRole::kPrefill));
  const KvNonces nonces{.prefill = theirs.nonce, .decode = challenge.nonce};
  FP4MOE_RETURN_IF_ERROR(
      send_text(socket, KvFrameType::kHello, seal_hello(ours, secret, NodeRole::kDecode, nonces)));
  FP4MOE_ASSIGN_OR_RETURN(const KvFrame second, receive(socket, KvStage::kHello, end_by));
  FP4MOE_ASSIGN_OR_RETURN(KvHello hello, open_hello(second.payload, secret, NodeRole::kPrefill, nonces));
  FP4MOE_RETURN_IF_ERROR(compare_hello(hello, ours));
  if (hello.epoch == 0) return data_loss("the prefill node's epoch is 0; expected any other number");
  return hello;
}

Status greet_decode_node(KvSocket& socket, const KvHello& ours, const NodeSecret& secret,
                         KvSocket::Clock::time_point end_by, const std::function<Status()>& admit) {
  const Status status = respond_to_decode_node(socket, ours, secret, end_by, admit);
  if (!status.ok()) static_cast<void>(send_text(socket, KvFrameType::kFailed, encode_failure(status)));
  return status;
}

}  // namespace fp4moe
