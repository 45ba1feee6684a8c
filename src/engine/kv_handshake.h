// The first frames of a connection: mutual proof of the shared secret, and comparison of what both nodes
// serve.
//
// Each side sends a challenge with a fresh nonce, then a hello whose proof is an HMAC-SHA256 under the secret
// over its role, both nonces and the hello's text. The decode node proves first: a stranger who connects to a
// prefill node learns nothing that was made with the secret. A proof is checked before its hello is parsed.
// Later frames carry a checksum, not a MAC: the secret keeps strangers out, it does not protect a connection
// from a machine on its path.
#pragma once

#include <functional>
#include <string>

#include "engine/kv_socket.h"
#include "engine/kv_wire.h"
#include "engine/node_secret.h"

namespace fp4moe {

// Both nonces of a connection.
struct KvNonces {
  NodeNonce prefill{}, decode{};
};

// A kHello payload: the proof, then the hello as JSON.
std::string seal_hello(const KvHello& hello, const NodeSecret& secret, NodeRole role, const KvNonces& nonces);
// kUnsupported: the proof is not that of this role, secret and nonces; kDataLoss: the hello is malformed.
Result<KvHello> open_hello(std::span<const uint8_t> payload, const NodeSecret& secret, NodeRole role,
                           const KvNonces& nonces);

// A decode node's side: returns the prefill node's hello, which holds the connection's epoch. Errors are the
// prefill node's refusal, a proof or fact that differs (kUnsupported), malformed frames, or the socket's.
Result<KvHello> greet_prefill_node(KvSocket& socket, const KvHello& ours, const NodeSecret& secret,
                                   KvSocket::Clock::time_point end_by);

// A prefill node's side; `ours` has the connection's epoch. A decode node that proves the secret and serves
// the same is admitted, or refused with what `admit` returns. Refusals are sent to the decode node.
Status greet_decode_node(KvSocket& socket, const KvHello& ours, const NodeSecret& secret,
                         KvSocket::Clock::time_point end_by, const std::function<Status()>& admit);

}  // namespace fp4moe
