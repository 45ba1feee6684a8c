// NodeSecret: the secret that prefill nodes and decode nodes share, and the proofs that a node has it.
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

// Whose proof it is. A proof of one role is never valid for the other one, so neither side can answer with
// what it was sent.
enum class NodeRole : uint8_t { kPrefill = 1, kDecode = 2 };

// The secret's bytes are kept in this object alone and are zeroed at its end. Thread-safe.
class NodeSecret {
 public:
  NodeSecret() = default;  // none: every node that can connect is trusted
  // The file's bytes without a final newline, 16 to 4096 of them. kNotFound: the file cannot be opened.
  // kInvalidArgument: it is not a regular file, has fewer or more bytes, belongs to another user than root
  // and this process's, or others may read it, or write to it or its group may. Messages never show its
  // bytes.
  static Result<NodeSecret> load(const std::string& path);
  static Result<NodeSecret> make(std::span<const uint8_t> bytes);

  ~NodeSecret();
  NodeSecret(NodeSecret&&) = default;
  NodeSecret& operator=(NodeSecret&&) = default;
  NodeSecret(const NodeSecret&) = delete;
  NodeSecret& operator=(const NodeSecret&) = delete;

  bool is_set() const { return !bytes_.empty(); }
  // HMAC-SHA256, under the secret, of the role, both nonces and the message. All zero without a secret.
  NodeProof prove(NodeRole role, const NodeNonce& prefill_nonce, const NodeNonce& decode_nonce,
                  std::span<const uint8_t> message) const;
  // Whether `proof` is the one that prove() makes; compared in constant time. Without a secret any is.
  bool verify(const NodeProof& proof, NodeRole role, const NodeNonce& prefill_nonce,
              const NodeNonce& decode_nonce, std::span<const uint8_t> message) const;

 private:
  std::vector<uint8_t> bytes_;
};

}  // namespace fp4moe
