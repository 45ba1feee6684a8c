// The handshake of a connection: both nodes prove that they know the shared secret and compare their facts
// (KvHello).
//
// Each node sends a challenge with a fresh nonce, then a hello whose proof is an HMAC-SHA256 under the secret
// over its role, both nonces and the hello's text. The decode node sends its proof first, so a stranger that
// connects to a prefill node receives nothing derived from the secret. A proof is verified before its hello
// is parsed. Later frames carry a checksum, not a MAC: the secret keeps strangers out but does not protect a
// connection against a machine on its path.
#pragma once

#include <functional>
#include <string>

#include "engine/disagg/kv_socket.h"
#include "engine/disagg/kv_wire.h"
#include "engine/disagg/node_secret.h"

namespace fp4moe {

// The nonces of both nodes of a connection.
struct KvNonces {
  NodeNonce prefill{}, decode{};
};

// A kHello payload: the proof, followed by the hello as JSON.
std::string seal_hello(const KvHello& hello, const NodeSecret& secret, NodeRole role, const KvNonces& nonces);
// kUnsupported: the proof does not match this role, secret and nonces; kDataLoss: the payload is malformed.
Result<KvHello> open_hello(std::span<const uint8_t> payload, const NodeSecret& secret, NodeRole role,
                           const KvNonces& nonces);

// Runs the decode node's side. Returns the prefill node's hello, which holds the connection's epoch. Errors:
// the prefill node's refusal, an invalid proof or differing facts (kUnsupported), malformed frames, or the
// socket's errors.
Result<KvHello> greet_prefill_node(KvSocket& socket, const KvHello& ours, const NodeSecret& secret,
                                   KvSocket::Clock::time_point end_by);

// Runs the prefill node's side; `ours` holds the connection's epoch. A decode node that proves that it knows
// the secret, and whose facts match, is admitted if `admit` returns OK. A refusal is also sent to the decode
// node.
Status greet_decode_node(KvSocket& socket, const KvHello& ours, const NodeSecret& secret,
                         KvSocket::Clock::time_point end_by, const std::function<Status()>& admit);

}  // namespace fp4moe
