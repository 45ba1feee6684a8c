#include "engine/disagg/kv_wire.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/hash.h"
#include "base/printable.h"

namespace fp4moe {
namespace {

uint64_t checksum_of(KvFrameHeader header, std::span<const uint8_t> payload) {
  header.checksum = 0;
  const uint64_t seed = hash64(&header, sizeof header);
  return hash64(payload.data(), static_cast<int64_t>(payload.size()), seed);
}

constexpr size_t kShownFactBytes = 80;  // of a fact, in messages

struct Legality {
  KvFrameType type;
  int64_t most_bytes;  // of its payload
};

// Frame types that a stage accepts; the receiver sets kPage's limit.
std::span<const Legality> legal_types(KvStage stage) {
  using enum KvFrameType;
  static constexpr Legality kChallengeStage[] = {{kChallenge, sizeof(KvChallenge)},
                                                 {kFailed, kMaxKvHelloBytes}};
  static constexpr Legality kHelloStage[] = {{kHello, kMaxKvHelloBytes}, {kFailed, kMaxKvHelloBytes}};
  static constexpr Legality kPrefillStage[] = {
      {kPrefill, kMaxKvMessageBytes}, {kTake, sizeof(int64_t)}, {kRelease, 0}};
  static constexpr Legality kDecodeStage[] = {
      {kFirstToken, kMaxKvMessageBytes}, {kPage, 0}, {kFailed, kMaxKvHelloBytes}};
  switch (stage) {
    case KvStage::kChallenge:
      return kChallengeStage;
    case KvStage::kHello:
      return kHelloStage;
    case KvStage::kToPrefill:
      return kPrefillStage;
    case KvStage::kToDecode:
      return kDecodeStage;
  }
  return {};
}

std::string names_of(std::span<const Legality> types) {
  std::string names;
  for (const Legality& legal : types)
    names += (names.empty() ? "" : ", ") + std::to_string(static_cast<uint32_t>(legal.type));
  return names;
}

Status bad(const std::string& what, uint64_t value, const std::string& legal) {
  return data_loss("a frame's " + what + " is " + std::to_string(value) + "; expected " + legal);
}

template <class T>
Result<T> read_fixed(std::span<const uint8_t> payload, const char* what) {
  if (payload.size() < sizeof(T))
    return data_loss(std::string(what) + " of " + std::to_string(payload.size()) +
                     " bytes; expected at least " + std::to_string(sizeof(T)));
  T value;
  std::memcpy(&value, payload.data(), sizeof value);
  return value;
}

}  // namespace

std::vector<uint8_t> open_kv_frame(KvFrameType type, uint64_t epoch, uint64_t room, int64_t num_bytes) {
  std::vector<uint8_t> frame(sizeof(KvFrameHeader) + static_cast<size_t>(num_bytes));
  open_kv_frame(type, epoch, room, frame);
  return frame;
}

void open_kv_frame(KvFrameType type, uint64_t epoch, uint64_t room, std::span<uint8_t> frame) {
  const KvFrameHeader header{
      .type = type, .epoch = epoch, .room = room, .num_bytes = std::ssize(kv_payload(frame))};
  std::memcpy(frame.data(), &header, sizeof header);
}

void seal_kv_frame(std::span<uint8_t> frame) {
  KvFrameHeader header;
  std::memcpy(&header, frame.data(), sizeof header);
  header.checksum = checksum_of(header, kv_payload(frame));
  std::memcpy(frame.data(), &header, sizeof header);
}

std::vector<uint8_t> kv_frame(KvFrameType type, uint64_t epoch, uint64_t room,
                              std::span<const uint8_t> payload) {
  std::vector<uint8_t> frame = open_kv_frame(type, epoch, room, static_cast<int64_t>(payload.size()));
  std::copy_n(payload.data(), payload.size(), kv_payload(frame).data());
  seal_kv_frame(frame);
  return frame;
}

std::vector<uint8_t> kv_frame(KvFrameType type, uint64_t epoch, uint64_t room, std::string_view payload) {
  return kv_frame(type, epoch, room,
                  std::span(reinterpret_cast<const uint8_t*>(payload.data()), payload.size()));
}

Result<KvFrameHeader> read_kv_header(std::span<const uint8_t> bytes, const KvLegal& legal) {
  FP4MOE_ASSIGN_OR_RETURN(const KvFrameHeader header, read_fixed<KvFrameHeader>(bytes, "a frame's header"));
  // The value is not shown: it may be the first bytes that an unrelated client sent.
  if (header.magic != kKvMagic) return data_loss("a frame's magic is not that of an fp4moe node");
  const std::span<const Legality> types = legal_types(legal.stage);
  const auto found = std::ranges::find(types, header.type, &Legality::type);
  if (found == types.end())
    return bad("type", static_cast<uint32_t>(header.type), names_of(types) + " at this stage");
  if (header.epoch != legal.epoch)
    return bad("epoch", header.epoch, "this connection's, " + std::to_string(legal.epoch));
  const int64_t most = header.type == KvFrameType::kPage ? legal.max_page_bytes : found->most_bytes;
  if (header.num_bytes < 0 || header.num_bytes > most)
    return data_loss("a frame's payload has " + std::to_string(header.num_bytes) + " bytes; expected 0 to " +
                     std::to_string(most));
  return header;
}

Status check_kv_payload(KvFrameHeader header, std::span<const uint8_t> payload) {
  FP4MOE_CHECK(std::ssize(payload) == header.num_bytes, std::to_string(payload.size()) + " bytes");
  const uint64_t computed = checksum_of(header, payload);
  if (computed == header.checksum) return {};
  return data_loss("a frame's checksum is " + std::to_string(header.checksum) + ", but its " +
                   std::to_string(payload.size()) + " bytes have checksum " + std::to_string(computed));
}

std::string encode_challenge(const KvChallenge& challenge) {
  return {reinterpret_cast<const char*>(&challenge), sizeof challenge};
}

Result<KvChallenge> decode_challenge(std::span<const uint8_t> payload) {
  return read_fixed<KvChallenge>(payload, "a challenge");
}

Status compare_hello(const KvHello& prefill_node, const KvHello& decode_node) {
  const auto value_of = [](const KvHello& hello, const std::string& name) -> std::string {
    for (const auto& [fact, value] : hello.facts)
      if (fact == name) return value;
    return "none";
  };
  for (const KvHello* side : {&prefill_node, &decode_node})
    for (const auto& [name, value] : side->facts) {
      const std::string prefill = value_of(prefill_node, name), decode = value_of(decode_node, name);
      if (prefill != decode)
        return unsupported(printable(name, kShownFactBytes) + " is " + printable(prefill, kShownFactBytes) +
                           " on the prefill node and " + printable(decode, kShownFactBytes) +
                           " on the decode node; they must be the same");
    }
  return {};
}

Result<int64_t> decode_take(std::span<const uint8_t> payload) {
  return read_fixed<int64_t>(payload, "a page number");
}

Result<KvPageHeader> decode_page(std::span<const uint8_t> payload, const KvPageShape& shape) {
  FP4MOE_ASSIGN_OR_RETURN(const KvPageHeader page, read_fixed<KvPageHeader>(payload, "a page"));
  if (page.index < 0 || page.index >= shape.num_parts()) {
    const std::string state =
        shape.state_bytes == 0 ? "" : " and a state of " + std::to_string(shape.state_bytes) + " bytes";
    return data_loss("page " + std::to_string(page.index) + " of a prompt of " +
                     std::to_string(shape.num_tokens) + " tokens" + state + "; expected 0 to " +
                     std::to_string(shape.num_parts() - 1));
  }
  if (page.num_tokens != shape.tokens_of(page.index))
    return data_loss("page " + std::to_string(page.index) + " has " + std::to_string(page.num_tokens) +
                     " tokens, expected " + std::to_string(shape.tokens_of(page.index)));
  const int64_t num_bytes = std::ssize(payload) - int64_t{sizeof page};
  if (num_bytes != shape.bytes_of(page.index))
    return data_loss("page " + std::to_string(page.index) + " has " + std::to_string(num_bytes) +
                     " bytes, expected " + std::to_string(shape.bytes_of(page.index)));
  return page;
}

}  // namespace fp4moe
