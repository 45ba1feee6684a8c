// KvWire: what a prefill node and a decode node send each other over TCP (docs/disaggregation.md).
//
// A decode node connects to a prefill node. Each sends a challenge, then a hello that proves the shared
// secret over both nonces (engine/kv_handshake.h), and a node that finds a difference refuses. Then the
// decode node asks for prompts, each under a room number that it never uses again:
//
//   decode node                      prefill node
//   kChallenge                    ->
//                                 <- kChallenge
//   kHello     proof, KvHello     -> compares
//   compares                      <- kHello     proof, KvHello
//
//   kPrefill   room, PrefillCall  -> computes the prompt, chooses the first token, holds the pages
//                                 <- kFirstToken  room, FirstToken
//   kTake      room, first page   ->              once the decode node has pages free: from which one on
//                                 <- kPage        room, KvPageHeader and the page, one after another
//   kRelease   room               -> gives the pages back; at any time: the decode node left the room
//                                 <- kFailed      room and why; room 0: the connection as a whole
//
// A page travels in canonical form (KvCache::read_page), which knows no ranks: [layers, tensors, tokens, KV
// heads, head_dim] of the KV cache's type, tensors being keys and values, or with latent attention the one
// latent.
//
// Every frame is a header and a payload under one checksum. It carries the epoch that the prefill node chose
// at random for this connection: frames of another connection, or of a node before its restart, are refused.
// Frames for a released room are dropped.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/node_secret.h"
#include "engine/sampler.h"
#include "fp4moe/request.h"
#include "fp4moe/status.h"

namespace fp4moe {

constexpr uint32_t kKvMagic = 0x44503446;  // "F4PD"
constexpr uint32_t kKvProtocol = 2;
constexpr int64_t kMaxKvMessageBytes = 64 << 20;  // of a kPrefill and of a kFirstToken payload
constexpr int64_t kMaxKvHelloBytes = 16 << 10;    // of a kHello and of a kFailed payload

enum class KvFrameType : uint32_t {
  kHello = 1,
  kPrefill = 2,
  kFirstToken = 3,
  kTake = 4,  // int64_t: the first page that is wanted
  kPage = 5,
  kRelease = 6,  // nothing
  kFailed = 7,
  kChallenge = 8,
};

// Which frames a node accepts next.
enum class KvStage {
  kChallenge,  // either node: kChallenge, kFailed
  kHello,      // either node: kHello, kFailed
  kToPrefill,  // a prefill node after the hello: kPrefill, kTake, kRelease
  kToDecode,   // a decode node after the hello: kFirstToken, kPage, kFailed
};

// Little-endian, as all that follows.
struct KvFrameHeader {
  uint32_t magic = kKvMagic;
  KvFrameType type = KvFrameType::kHello;
  uint64_t epoch = 0;  // 0: a challenge, a hello, and a refusal in place of one
  uint64_t room = 0;
  int64_t num_bytes = 0;  // of the payload
  uint64_t checksum = 0;  // hash64 of this header with checksum = 0, then of the payload
};
static_assert(sizeof(KvFrameHeader) == 40);

struct KvPageHeader {
  int64_t index = 0;       // in the sequence's page table
  int64_t num_tokens = 0;  // page_size, or fewer in the last page
};

// A whole frame.
std::vector<uint8_t> kv_frame(KvFrameType type, uint64_t epoch, uint64_t room,
                              std::span<const uint8_t> payload);
std::vector<uint8_t> kv_frame(KvFrameType type, uint64_t epoch, uint64_t room, std::string_view payload);
// A frame with room for num_bytes of payload, to be sealed when that is there.
std::vector<uint8_t> open_kv_frame(KvFrameType type, uint64_t epoch, uint64_t room, int64_t num_bytes);
void seal_kv_frame(std::vector<uint8_t>& frame);
inline std::span<uint8_t> kv_payload(std::vector<uint8_t>& frame) {
  return std::span(frame).subspan(sizeof(KvFrameHeader));
}

// What a receiver accepts.
struct KvLegal {
  KvStage stage = KvStage::kChallenge;
  uint64_t epoch = 0;
  int64_t max_page_bytes = 0;  // of a kPage payload
};

// Checks a header before anything is allocated: kDataLoss naming the field, its value and what is legal.
Result<KvFrameHeader> read_kv_header(std::span<const uint8_t> bytes, const KvLegal& legal);
Status check_kv_payload(KvFrameHeader header, std::span<const uint8_t> payload);

// ---- payloads -------------------------------------------------------------------------------------
// A kPrefill, kHello, kFirstToken and kFailed payload is JSON, a kHello's behind its proof. Decoding bounds
// its depth, values and keys before it builds anything, and refuses what is malformed with kDataLoss. No
// message quotes more than a short escaped excerpt of what the peer sent.

struct KvChallenge {
  uint32_t protocol = kKvProtocol;
  uint32_t has_secret = 0;  // 1: the other side must prove it
  NodeNonce nonce{};
};
static_assert(sizeof(KvChallenge) == 40);
std::string encode_challenge(const KvChallenge& challenge);
// Of another protocol too: only the length is checked.
Result<KvChallenge> decode_challenge(std::span<const uint8_t> payload);

struct KvHello {
  uint64_t epoch = 0;  // the prefill node's, of all that follows
  // What must be the same on both nodes, in the order in which it is compared. At most 16 facts; names of at
  // most 64 bytes, values of at most 256.
  std::vector<std::pair<std::string, std::string>> facts;
};
std::string encode_kv_hello(const KvHello& hello);
Result<KvHello> decode_kv_hello(std::span<const uint8_t> payload);
// kUnsupported, naming the first fact that differs and both values.
Status compare_hello(const KvHello& prefill_node, const KvHello& decode_node);

// The prompt, what is wanted of it, and all that has to do with the choice of its first token. The seed is
// always given; id, timeout and prefill_node stay at home.
std::string encode_prefill(const Request& request);
Result<Request> decode_prefill(std::span<const uint8_t> payload);

struct FirstToken {
  SampledToken token;                // texts of tokens are left empty, here and below
  std::vector<SampledToken> scored;  // the prompt's tokens, if their log-probabilities are wanted
  std::vector<int32_t> experts;      // as in Sequence, if they are wanted
  int64_t cached_tokens = 0;         // of the prompt, that an earlier request left on the prefill node
};
std::string encode_first_token(const FirstToken& first);
Result<FirstToken> decode_first_token(std::span<const uint8_t> payload);

// The message's first 1024 bytes, escaped (base/printable.h), in either direction.
std::string encode_failure(const Status& status);
Status decode_failure(std::span<const uint8_t> payload);  // never OK

Result<int64_t> decode_take(std::span<const uint8_t> payload);
// The header; the page is what follows it. Checks that there are as many bytes as num_tokens have, and that
// the page is one of num_pages, whose last one has num_tokens in all to end with.
struct KvPageShape {
  int64_t num_tokens = 0;   // of the prompt
  int64_t token_bytes = 0;  // of one token in a canonical page
  int page_size = 0;
  int64_t num_pages() const { return (num_tokens + page_size - 1) / page_size; }
  int64_t tokens_of(int64_t page) const {
    return page + 1 < num_pages() ? page_size : num_tokens - page * page_size;
  }
};
Result<KvPageHeader> decode_page(std::span<const uint8_t> payload, const KvPageShape& shape);

}  // namespace fp4moe
