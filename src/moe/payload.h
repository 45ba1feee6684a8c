// How rows travel in an a2a exchange.
#pragma once

#include <cstdint>

namespace fp4moe {

// What carries a row to its experts.
enum class Payload : uint8_t {
  kAct,    // bf16 (f32 with --dtype float32)
  kFp8,    // e4m3 with one f32 scale for 128 columns
  kNvfp4,  // codes, block scales and an f32 tensor scale for the row
};
const char* payload_name(Payload payload);  // "bf16", "fp8", "nvfp4"

// What carries results back.
enum class CombinePayload : uint8_t {
  kAct,  // bf16 (f32 with --dtype float32)
  kFp8,  // e4m3, saturating cast without a scale
};
const char* combine_payload_name(CombinePayload payload);  // "bf16", "fp8"

// What the plan decides about the exchange beside the protocol.
struct A2aSettings {
  Payload payload = Payload::kAct;
  CombinePayload combine_payload = CombinePayload::kAct;
  bool deterministic = false;  // per-expert rows travel back and are summed in top-k order
  bool checksum = false;       // verify every row that arrives
  int64_t memory_budget = 0;   // bytes of the heap region
};

}  // namespace fp4moe
