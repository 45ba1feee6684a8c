#include "engine/disagg/node_secret.h"

#include <fcntl.h>
#include <sodium.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string_view>

#include "base/check.h"

namespace fp4moe {
namespace {

constexpr size_t kLeastBytes = 16, kMostBytes = 4096;
constexpr std::string_view kLabel = "fp4moe node hello 2";
static_assert(sizeof(NodeProof) == crypto_auth_hmacsha256_BYTES);

// Thread-safe and idempotent.
void init_sodium() { FP4MOE_CHECK(sodium_init() >= 0, "sodium_init failed"); }

// The group may read the file: orchestrators mount secrets as root:GROUP 0440.
Status check_permissions(const struct stat& file) {
  if (!S_ISREG(file.st_mode)) return invalid_argument("is not a regular file");
  if (file.st_uid != 0 && file.st_uid != geteuid())
    return invalid_argument("belongs to user " + std::to_string(file.st_uid) +
                            "; it must belong to root or to user " + std::to_string(geteuid()) +
                            ", which runs this process");
  const mode_t mode = file.st_mode & 0777;
  if ((mode & (S_IWGRP | S_IRWXO)) == 0) return {};
  char octal[8];
  std::snprintf(octal, sizeof octal, "%04o", static_cast<unsigned>(mode));
  return invalid_argument(std::string("has mode ") + octal +
                          "; it must not be accessible to others or writable by its group (chmod 600)");
}

}  // namespace

NodeNonce random_nonce() {
  init_sodium();
  NodeNonce nonce;
  randombytes_buf(nonce.data(), nonce.size());
  return nonce;
}

Result<NodeSecret> NodeSecret::make(std::span<const uint8_t> bytes) {
  if (bytes.size() < kLeastBytes || bytes.size() > kMostBytes)
    return invalid_argument("the secret has " + std::to_string(bytes.size()) + " bytes; expected " +
                            std::to_string(kLeastBytes) + " to " + std::to_string(kMostBytes) +
                            ", such as the output of `openssl rand -hex 32`");
  init_sodium();
  NodeSecret secret;
  secret.bytes_.assign(bytes.begin(), bytes.end());
  return secret;
}

Result<NodeSecret> NodeSecret::load(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return not_found(path + ": " + std::strerror(errno));
  std::array<uint8_t, kMostBytes + 2> bytes;  // room for a newline, and one byte to detect a longer file
  size_t size = 0;
  struct stat file {};
  Status status = ::fstat(descriptor, &file) == 0 ? check_permissions(file) : not_found(std::strerror(errno));
  while (status.ok() && size < bytes.size()) {
    const ssize_t got = ::read(descriptor, bytes.data() + size, bytes.size() - size);
    if (got < 0) status = not_found(std::strerror(errno));
    if (got <= 0) break;
    size += static_cast<size_t>(got);
  }
  ::close(descriptor);
  if (size > 0 && bytes[size - 1] == '\n') {
    --size;
    if (size > 0 && bytes[size - 1] == '\r') --size;
  }
  Result<NodeSecret> secret = status;
  if (status.ok()) secret = make(std::span(bytes).first(size));
  sodium_memzero(bytes.data(), bytes.size());
  if (!secret.ok()) return secret.status().with_context(path);
  return secret;
}

NodeSecret::~NodeSecret() {
  if (!bytes_.empty()) sodium_memzero(bytes_.data(), bytes_.size());
}

NodeProof NodeSecret::prove(NodeRole role, const NodeNonce& prefill_nonce, const NodeNonce& decode_nonce,
                            std::span<const uint8_t> message) const {
  NodeProof proof{};
  if (!is_set()) return proof;
  // Label, role and nonces have fixed sizes, so two different inputs never hash the same bytes.
  crypto_auth_hmacsha256_state state;
  crypto_auth_hmacsha256_init(&state, bytes_.data(), bytes_.size());
  crypto_auth_hmacsha256_update(&state, reinterpret_cast<const uint8_t*>(kLabel.data()), kLabel.size());
  const auto role_byte = static_cast<uint8_t>(role);
  crypto_auth_hmacsha256_update(&state, &role_byte, 1);
  crypto_auth_hmacsha256_update(&state, prefill_nonce.data(), prefill_nonce.size());
  crypto_auth_hmacsha256_update(&state, decode_nonce.data(), decode_nonce.size());
  crypto_auth_hmacsha256_update(&state, message.data(), message.size());
  crypto_auth_hmacsha256_final(&state, proof.data());
  sodium_memzero(&state, sizeof state);
  return proof;
}

bool NodeSecret::verify(const NodeProof& proof, NodeRole role, const NodeNonce& prefill_nonce,
                        const NodeNonce& decode_nonce, std::span<const uint8_t> message) const {
  if (!is_set()) return true;
  const NodeProof wanted = prove(role, prefill_nonce, decode_nonce, message);
  return sodium_memcmp(wanted.data(), proof.data(), proof.size()) == 0;
}

}  // namespace fp4moe
