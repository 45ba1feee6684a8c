// Data from another node on the bootstrap port. The first byte selects how the rest is used: as a payload
// that is decoded as each type in turn, a stream of frames, a hello with a valid proof, the repeated unit of
// a long payload, or the node address in a request. Error messages stay short, printable and on one line.
#include <algorithm>
#include <string>
#include <vector>

#include "base/check.h"
#include "engine/disagg/kv_handshake.h"
#include "engine/disagg/kv_wire.h"
#include "engine/disagg/node_address.h"

namespace fp4moe {
namespace {

constexpr int64_t kMaxPageBytes = 1 << 16;
constexpr uint64_t kEpoch = 9;

std::string_view text_of(std::span<const uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void check(const Status& status) {
  const std::string& message = status.message();
  FP4MOE_CHECK(message.size() < 2048, std::to_string(message.size()) + " bytes of message");
  FP4MOE_CHECK(std::ranges::all_of(message, [](char c) { return c >= 0x20 && c < 0x7f; }), "not printable");
}

void decode_payload(KvFrameType type, std::span<const uint8_t> payload) {
  switch (type) {
    case KvFrameType::kHello: {
      const auto hello = decode_kv_hello(payload);
      check(hello.status());
      if (hello.ok()) check(compare_hello({}, *hello));
      return;
    }
    case KvFrameType::kPrefill: {
      const auto request = decode_prefill(payload);
      check(request.status());
      if (!request.ok()) return;
      const std::string again = encode_prefill(*request);  // an accepted request can be encoded again
      FP4MOE_CHECK(decode_prefill({reinterpret_cast<const uint8_t*>(again.data()), again.size()}).ok(),
                   again);
      return;
    }
    case KvFrameType::kFirstToken:
      return check(decode_first_token(payload).status());
    case KvFrameType::kTake:
      return check(decode_take(payload).status());
    case KvFrameType::kPage:
      for (const int64_t state_bytes : {int64_t{0}, int64_t{100}, kKvStatePieceBytes + 1})
        check(decode_page(payload,
                          {.num_tokens = 37, .token_bytes = 4, .page_size = 16, .state_bytes = state_bytes})
                  .status());
      return;
    case KvFrameType::kFailed:
      return check(decode_failure(payload));
    case KvFrameType::kChallenge:
      return check(decode_challenge(payload).status());
    case KvFrameType::kRelease:
      return;
  }
}

void decode_all(std::span<const uint8_t> payload) {
  for (uint32_t type = 1; type <= static_cast<uint32_t>(KvFrameType::kChallenge); ++type)
    decode_payload(static_cast<KvFrameType>(type), payload);
}

// Parses frames like KvSocket::receive() until one is refused.
void read_stream(std::span<const uint8_t> bytes, KvStage stage) {
  while (bytes.size() >= sizeof(KvFrameHeader)) {
    const auto header =
        read_kv_header(bytes, {.stage = stage, .epoch = kEpoch, .max_page_bytes = kMaxPageBytes});
    check(header.status());
    if (!header.ok()) return;
    bytes = bytes.subspan(sizeof(KvFrameHeader));
    if (std::ssize(bytes) < header->num_bytes) return;
    const auto payload = bytes.first(static_cast<size_t>(header->num_bytes));
    const Status intact = check_kv_payload(*header, payload);
    check(intact);
    if (!intact.ok()) return;
    decode_payload(header->type, payload);
    bytes = bytes.subspan(payload.size());
  }
}

// Builds frames with valid checksums whose types and lengths come from the input (two bytes each), followed
// by the rest of the input.
std::vector<uint8_t> make_stream(std::span<const uint8_t> bytes) {
  std::vector<uint8_t> stream;
  while (bytes.size() > 2) {
    const auto type = static_cast<KvFrameType>(bytes[0] % 10);
    const size_t length = std::min<size_t>(bytes[1] * size_t{17}, bytes.size() - 2);
    const auto frame = kv_frame(type, kEpoch, bytes[0], bytes.subspan(2, length));
    stream.insert(stream.end(), frame.begin(), frame.end());
    bytes = bytes.subspan(2 + length);
  }
  stream.insert(stream.end(), bytes.begin(), bytes.end());
  return stream;
}

// A valid proof does not change which hellos are accepted; an invalid proof is always refused.
void open_sealed_hello(std::span<const uint8_t> json) {
  static const NodeSecret secret = *NodeSecret::make(std::vector<uint8_t>(32, 's'));
  KvNonces nonces;
  nonces.prefill.fill(1);
  nonces.decode.fill(2);
  const NodeProof proof = secret.prove(NodeRole::kDecode, nonces.prefill, nonces.decode, json);
  std::vector<uint8_t> payload(proof.begin(), proof.end());
  payload.insert(payload.end(), json.begin(), json.end());
  const auto opened = open_hello(payload, secret, NodeRole::kDecode, nonces);
  check(opened.status());
  const auto plain = decode_kv_hello(json);
  FP4MOE_CHECK(opened.ok() == plain.ok() && opened.status().message() == plain.status().message(),
               opened.status().message());
  check(open_hello(json, secret, NodeRole::kDecode, nonces).status());
  payload[json.size() % payload.size()] ^= 1;
  FP4MOE_CHECK(!open_hello(payload, secret, NodeRole::kDecode, nonces).ok(), "a damaged hello is accepted");
}

// Returns the input with its middle part repeated up to 256 KiB.
std::vector<uint8_t> make_long(std::span<const uint8_t> bytes) {
  const size_t head = bytes.empty() ? 0 : bytes[0] % bytes.size();
  const size_t unit = bytes.empty() ? 0 : std::min<size_t>(1 + bytes[0] / 16, bytes.size() - head);
  const auto repeated = bytes.subspan(head, unit);
  std::vector<uint8_t> payload(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(head));
  const size_t most = bytes.size() % 4 == 0 ? 1 << 18 : 1 << 14;
  while (unit > 0 && payload.size() < most) payload.insert(payload.end(), repeated.begin(), repeated.end());
  payload.insert(payload.end(), bytes.begin() + static_cast<std::ptrdiff_t>(head + unit), bytes.end());
  return payload;
}

void read_addresses(std::span<const uint8_t> bytes) {
  const std::string text(text_of(bytes));
  const auto address = parse_node_address(text);
  check(address.status());
  if (address.ok()) check(AllowedHosts().check(*address));
  const auto hosts = AllowedHosts::parse({text});
  check(hosts.status());
  if (hosts.ok() && address.ok()) FP4MOE_CHECK(hosts->check(*address).ok(), "an entry does not allow itself");
}

}  // namespace
}  // namespace fp4moe

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fp4moe;
  if (size == 0) return 0;
  const std::span<const uint8_t> bytes(data + 1, size - 1);
  const auto stage = static_cast<KvStage>(data[0] / 8 % 4);
  switch (data[0] % 8) {
    case 0:
      read_stream(bytes, stage);
      break;
    case 1:
      read_stream(make_stream(bytes), stage);
      break;
    case 2:
      open_sealed_hello(bytes);
      break;
    case 3:
      decode_all(make_long(bytes));
      break;
    case 4:
      read_addresses(bytes);
      break;
    default:
      decode_all(bytes);
  }
  return 0;
}
