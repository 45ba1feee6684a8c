// KvWire: the TCP protocol between a prefill node and a decode node (docs/disaggregation.md).
//
// A decode node connects to a prefill node. Each sends a challenge, then a hello with a proof, over both
// nonces, that it knows the shared secret (engine/disagg/kv_handshake.h). A node refuses the connection if
// the hellos' facts differ. The decode node then requests prompts, each under a room number that it never
// reuses:
//
//   decode node                      prefill node
//   kChallenge                    ->
//                                 <- kChallenge
//   kHello     proof, KvHello     -> compares
//   compares                      <- kHello     proof, KvHello
//
//   kPrefill   room, Request      -> computes the prompt, samples the first token, holds the pages
//   kTake      room, first part   -> (once the decode node has allocated pages, and a slot for a state: right
//                                    after kPrefill, or when it has the first token)
//                                 <- kPage        room, KvPageHeader and the part; one frame per part, as
//                                                 soon as the part is complete
//                                 <- kFirstToken  room, FirstToken; before the last part
//   kRelease   room               -> frees the pages; sent at any time when the decode node leaves the room
//                                 <- kFailed      room and error; room 0: the whole connection
//
// A page is sent in canonical form (KvCache::read_page), which is independent of ranks: [layers, tensors,
// tokens, KV heads, head_dim] in the KV cache's type. `tensors` is 2 (keys, values), or 1 (the latent) with
// latent attention. If window layers have separate pages (model/kv_window.h), the page of the full layers
// comes first; that of the window layers follows only for the last pages, which decode needs
// (KvPageShape::first_window_page).
//
// The pages of a model with states are followed by pieces of the state after the prompt, in canonical form
// (StateCache::read_slot): [layers, value heads, key_head_dim, value_head_dim], and of each layer [channels,
// conv_width - 1] behind it, in float32. Pages and pieces are the parts of a transfer, numbered from 0 on.
//
// Every frame is a header and a payload under one checksum. It carries the epoch that the prefill node chose
// at random for this connection, so that frames of another connection, or from before a node's restart, are
// refused. Frames for a released room are dropped.
//
// A decode node that gives the allocated pages back before they have all arrived can send another kTake for
// the same room later. It replaces the one before; each part carries the number of its kTake, and a decode
// node drops the parts of earlier ones.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/disagg/node_secret.h"
#include "engine/output/sampler.h"
#include "fp4moe/request.h"
#include "fp4moe/status.h"

namespace fp4moe {

constexpr uint32_t kKvMagic = 0x44503446;  // "F4PD"
constexpr uint32_t kKvProtocol = 4;
constexpr int64_t kMaxKvMessageBytes = 64 << 20;   // of a kPrefill or kFirstToken payload
constexpr int64_t kMaxKvHelloBytes = 16 << 10;     // of a kHello or kFailed payload
constexpr int64_t kKvStatePieceBytes = 512 << 10;  // of a state; its last piece may have fewer

enum class KvFrameType : uint32_t {
  kHello = 1,
  kPrefill = 2,
  kFirstToken = 3,
  kTake = 4,     // int64_t: index of the first part to send
  kPage = 5,     // or a piece of a state
  kRelease = 6,  // no payload
  kFailed = 7,
  kChallenge = 8,
};

// The stage of a connection: the frame types that a node accepts next.
enum class KvStage {
  kChallenge,  // either node: kChallenge, kFailed
  kHello,      // either node: kHello, kFailed
  kToPrefill,  // a prefill node after the hello: kPrefill, kTake, kRelease
  kToDecode,   // a decode node after the hello: kFirstToken, kPage, kFailed
};

// Little-endian, like everything below.
struct KvFrameHeader {
  uint32_t magic = kKvMagic;
  KvFrameType type = KvFrameType::kHello;
  uint64_t epoch = 0;  // 0 in kChallenge, kHello and a kFailed sent in place of one
  uint64_t room = 0;
  int64_t num_bytes = 0;  // of the payload
  uint64_t checksum = 0;  // hash64 of this header with checksum = 0, then of the payload
};
static_assert(sizeof(KvFrameHeader) == 40);

struct KvPageHeader {
  int64_t index = 0;       // of the part: that in the sequence's page table, or after all pages
  int64_t num_tokens = 0;  // page_size, or fewer in the last page; 0 in a piece of a state
  int64_t take = 1;        // the number of the kTake that it answers, counted in its room from 1 on
};

// Builds a whole frame.
std::vector<uint8_t> kv_frame(KvFrameType type, uint64_t epoch, uint64_t room,
                              std::span<const uint8_t> payload);
std::vector<uint8_t> kv_frame(KvFrameType type, uint64_t epoch, uint64_t room, std::string_view payload);
// Builds a frame with space for num_bytes of payload, which the caller fills before it calls
// seal_kv_frame().
std::vector<uint8_t> open_kv_frame(KvFrameType type, uint64_t epoch, uint64_t room, int64_t num_bytes);
// The same in memory that has the frame's size.
void open_kv_frame(KvFrameType type, uint64_t epoch, uint64_t room, std::span<uint8_t> frame);
void seal_kv_frame(std::span<uint8_t> frame);
inline std::span<uint8_t> kv_payload(std::span<uint8_t> frame) {
  return frame.subspan(sizeof(KvFrameHeader));
}

// The headers that a receiver accepts.
struct KvLegal {
  KvStage stage = KvStage::kChallenge;
  uint64_t epoch = 0;
  int64_t max_page_bytes = 0;  // of a kPage payload
};

// Validates a header before anything is allocated. kDataLoss names the field, its value and the allowed
// values.
Result<KvFrameHeader> read_kv_header(std::span<const uint8_t> bytes, const KvLegal& legal);
Status check_kv_payload(KvFrameHeader header, std::span<const uint8_t> payload);

// ---- payloads -------------------------------------------------------------------------------------
// kPrefill, kHello, kFirstToken and kFailed payloads are JSON; in kHello the JSON follows the proof. Decoding
// limits depth, values and keys before it builds anything, and returns kDataLoss for malformed input. Error
// messages quote at most a short escaped excerpt of the peer's data.

struct KvChallenge {
  uint32_t protocol = kKvProtocol;
  uint32_t has_secret = 0;  // 1: the sender has a secret and requires a proof of it
  NodeNonce nonce{};
};
static_assert(sizeof(KvChallenge) == 40);
std::string encode_challenge(const KvChallenge& challenge);
// Checks only the length: the peer's protocol version can differ.
Result<KvChallenge> decode_challenge(std::span<const uint8_t> payload);

struct KvHello {
  uint64_t epoch = 0;  // chosen by the prefill node; used by all later frames
  // Facts that must be equal on both nodes, in order of comparison: at most 16, with names of at most 64
  // bytes and values of at most 256.
  std::vector<std::pair<std::string, std::string>> facts;
};
std::string encode_kv_hello(const KvHello& hello);
Result<KvHello> decode_kv_hello(std::span<const uint8_t> payload);
// kUnsupported, naming the first fact that differs and both values.
Status compare_hello(const KvHello& prefill_node, const KvHello& decode_node);

// Contains the prompt, the requested outputs and everything that affects the choice of the first token. The
// request must have a seed; id, timeout and prefill_node are not sent.
std::string encode_prefill(const Request& request);
Result<Request> decode_prefill(std::span<const uint8_t> payload);

struct FirstToken {
  SampledToken token;                // `bytes` stays empty, here and in `scored`
  std::vector<SampledToken> scored;  // scores of the prompt's tokens, if requested
  std::vector<int32_t> experts;      // as in Sequence, if requested
  int64_t cached_tokens = 0;         // prompt tokens found in the prefill node's prefix cache
};
std::string encode_first_token(const FirstToken& first);
Result<FirstToken> decode_first_token(std::span<const uint8_t> payload);

// The message is escaped (base/printable.h) and cut to at most 1024 bytes, both when sent and when received.
std::string encode_failure(const Status& status);
Status decode_failure(std::span<const uint8_t> payload);  // never OK

Result<int64_t> decode_take(std::span<const uint8_t> payload);
// The parts of a transfer: the pages of a prompt, then pieces of its state.
struct KvPageShape {
  int64_t num_tokens = 0;   // of the prompt
  int64_t token_bytes = 0;  // of one token in a canonical page of full layers
  int page_size = 0;
  int64_t window_token_bytes = 0;  // of one token in a canonical page of window layers; 0: they have none
  int64_t first_window_page = 0;
  int64_t state_bytes = 0;  // of a state in canonical form; 0: the model has none
  int64_t num_pages() const { return (num_tokens + page_size - 1) / page_size; }
  int64_t num_parts() const {
    return num_pages() + (state_bytes + kKvStatePieceBytes - 1) / kKvStatePieceBytes;
  }
  bool is_page(int64_t part) const { return part < num_pages(); }
  // Returns where the bytes of a part that is not a page begin in the state.
  int64_t state_offset(int64_t part) const { return (part - num_pages()) * kKvStatePieceBytes; }
  int64_t tokens_of(int64_t part) const {
    if (!is_page(part)) return 0;
    return part + 1 < num_pages() ? page_size : num_tokens - part * page_size;
  }
  bool has_window_page(int64_t page) const { return window_token_bytes > 0 && page >= first_window_page; }
  int64_t bytes_of(int64_t part) const {
    if (!is_page(part)) return std::min(kKvStatePieceBytes, state_bytes - state_offset(part));
    return tokens_of(part) * (token_bytes + (has_window_page(part) ? window_token_bytes : 0));
  }
};
// Returns the header; the part's bytes follow it in `payload`. Checks that the index is valid, and that the
// part has the numbers of tokens and bytes that `shape` gives it.
Result<KvPageHeader> decode_page(std::span<const uint8_t> payload, const KvPageShape& shape);

}  // namespace fp4moe
