// KvWire: what a prefill node and a decode node say to each other over TCP (docs/disaggregation.md).
//
// A decode node connects to a prefill node. Both say hello, and whoever finds that the other one serves
// something else refuses. Then the decode node asks for prompts, each under a room number of its own that it
// never uses again:
//
//   decode node                      prefill node
//   kPrefill   room, PrefillCall  -> computes the prompt, chooses the first token, holds the pages
//                                 <- kFirstToken  room, FirstToken
//   kTake      room, first page   ->              once the decode node has pages free: from which one on
//                                 <- kPage        room, KvPageHeader and the page, one after another
//   kRelease   room               -> gives the pages back; at any time: nobody waits for the room any more
//                                 <- kFailed      room and why; room 0: the connection as a whole
//
// A page travels in canonical form (KvCache::read_page), which knows no ranks: [layers, tensors, tokens, KV
// heads, head_dim] of the KV cache's type, tensors being keys and values, or with latent attention the one
// latent.
//
// Every frame is a header and a payload under one checksum. It carries the epoch that the prefill node chose
// at random for this connection: what belongs to another connection, or to a node that has been restarted
// since, is taken by nobody; nor is what comes for a room that was released.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/sampler.h"
#include "fp4moe/request.h"
#include "fp4moe/status.h"

namespace fp4moe {

constexpr uint32_t kKvMagic = 0x44503446;  // "F4PD"
constexpr int kKvProtocol = 1;
constexpr int64_t kMaxKvMessageBytes = 64 << 20;  // of all payloads but pages

enum class KvFrameType : uint32_t {
  kHello = 1,
  kPrefill = 2,
  kFirstToken = 3,
  kTake = 4,  // int64_t: the first page that is wanted
  kPage = 5,
  kRelease = 6,  // nothing
  kFailed = 7,
};

// Little-endian, as all that follows.
struct KvFrameHeader {
  uint32_t magic = kKvMagic;
  KvFrameType type = KvFrameType::kHello;
  uint64_t epoch = 0;  // 0: a hello, and a refusal in place of one
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

// What comes in, before anything is allocated or believed: kDataLoss naming the field, its value and what is
// legal. max_page_bytes: of a kPage payload.
Result<KvFrameHeader> read_kv_header(std::span<const uint8_t> bytes, uint64_t epoch, int64_t max_page_bytes);
Status check_kv_payload(KvFrameHeader header, std::span<const uint8_t> payload);

// ---- payloads -------------------------------------------------------------------------------------
// All of them but pages are JSON; decoding refuses what is malformed with kDataLoss.

struct KvHello {
  uint64_t epoch = 0;  // the prefill node's, of all that follows
  // What must be the same on both nodes, in the order in which it is compared.
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
