// NodeSecret: the secret that prefill and decode nodes share, and proofs that a node knows it.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

using NodeNonce = std::array<uint8_t, 32>;
using NodeProof = std::array<uint8_t, 32>;  // HMAC-SHA256

NodeNonce random_nonce();

// The role of the node that made a proof. A proof for one role is never valid for the other, so a node cannot
// replay the proof that it received.
enum class NodeRole : uint8_t { kPrefill = 1, kDecode = 2 };

// The secret's bytes exist only in this object, which zeroes them on destruction. Thread-safe.
class NodeSecret {
 public:
  NodeSecret() = default;  // no secret: every node that can connect is trusted
  // The secret is the file's content without a final newline, 16 to 4096 bytes. kNotFound: the file cannot be
  // opened. kInvalidArgument: it is not a regular file, has another size, is owned by a user other than root
  // and this process's user, is accessible to others, or is writable by its group. Messages never contain its
  // bytes.
  static Result<NodeSecret> load(const std::string& path);
  static Result<NodeSecret> make(std::span<const uint8_t> bytes);

  ~NodeSecret();
  NodeSecret(NodeSecret&&) = default;
  NodeSecret& operator=(NodeSecret&&) = default;
  NodeSecret(const NodeSecret&) = delete;
  NodeSecret& operator=(const NodeSecret&) = delete;

  bool is_set() const { return !bytes_.empty(); }
  // HMAC-SHA256 of the role, both nonces and the message. All zero without a secret.
  NodeProof prove(NodeRole role, const NodeNonce& prefill_nonce, const NodeNonce& decode_nonce,
                  std::span<const uint8_t> message) const;
  // Compares `proof` with prove()'s result in constant time. True for any proof without a secret.
  bool verify(const NodeProof& proof, NodeRole role, const NodeNonce& prefill_nonce,
              const NodeNonce& decode_nonce, std::span<const uint8_t> message) const;

 private:
  std::vector<uint8_t> bytes_;
};

}  // namespace fp4moe
