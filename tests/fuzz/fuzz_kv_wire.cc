// What another node sends over the bootstrap port: headers, payloads of every type, pages.
#include "engine/kv_wire.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fp4moe;
  const std::span<const uint8_t> bytes(data, size);
  constexpr int64_t kMaxPageBytes = 1 << 16;
  if (const auto header = read_kv_header(bytes, 0, kMaxPageBytes); header.ok()) {
    const std::span<const uint8_t> payload = bytes.subspan(sizeof(KvFrameHeader));
    if (std::ssize(payload) == header->num_bytes) static_cast<void>(check_kv_payload(*header, payload));
  }
  if (const auto hello = decode_kv_hello(bytes); hello.ok()) static_cast<void>(compare_hello({}, *hello));
  static_cast<void>(decode_prefill(bytes));
  static_cast<void>(decode_first_token(bytes));
  static_cast<void>(decode_failure(bytes));
  static_cast<void>(decode_take(bytes));
  static_cast<void>(decode_page(bytes, {.num_tokens = 37, .token_bytes = 4, .page_size = 16}));
  return 0;
}
