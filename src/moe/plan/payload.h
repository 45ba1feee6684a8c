// Encodings of rows and settings of an a2a exchange.
#pragma once

#include <cstdint>

namespace fp4moe {

// Encoding of a row on its way to the experts.
enum class Payload : uint8_t {
  kAct,    // bf16 (f32 with --dtype float32)
  kFp8,    // e4m3 with one f32 scale per 128 columns
  kNvfp4,  // codes, block scales and one f32 tensor scale per row
};
const char* payload_name(Payload payload);  // "bf16", "fp8", "nvfp4"

// Encoding of results on their way back.
enum class CombinePayload : uint8_t {
  kAct,  // bf16 (f32 with --dtype float32)
  kFp8,  // e4m3, saturating cast without a scale
};
const char* combine_payload_name(CombinePayload payload);  // "bf16", "fp8"

// The plan's decisions about the exchange, apart from the protocol.
struct A2aSettings {
  Payload payload = Payload::kAct;
  CombinePayload combine_payload = CombinePayload::kAct;
  bool deterministic = false;  // per-expert rows are returned, and the source sums them in top-k order
  bool checksum = false;       // verify every row that arrives
  int64_t memory_budget = 0;   // bytes of heap for each rank's transport
};

}  // namespace fp4moe
