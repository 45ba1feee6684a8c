// What the GEMMs of FP4 linears compute with: the scheme, and the details in which runners differ.
#pragma once

#include <cstdint>
#include <string>

namespace fp4moe {

// Weights are FP4, activations are as named.
enum class Scheme : uint8_t {
  kW4A16,  // bf16 (or f32 with --dtype float32), FP32 accumulation and tensor scales
  kW4A4,   // NVFP4 activations
  kW4A8,   // 8-bit activations, see Act8
};
const char* scheme_name(Scheme scheme);  // "w4a16", "w4a4", "w4a8"

// What w4a8's activations are. The runner decides: INT8 on a CPU, FP8 on a GPU.
enum class Act8 : uint8_t {
  kInt8Block,  // INT8, one scale for each block of K
  kFp8Token,   // e4m3, one scale for each token; weights are folded into e4m3 operands (docs/numerics.md)
};

// Which tensor scale the w4a4 quantiser uses.
enum class ActScaleChoice : uint8_t {
  kScalar,  // one for the layer: the largest input scale over all E experts (and both halves), on every rank
  kPerExpert,  // each expert's own
  kPerToken,   // each row's own amax / 2688, of the part of I that a rank has: needs no calibration
};

// From what the intermediate (after the activation function) is quantised under w4a4.
enum class IntermediateRounding : uint8_t {
  kDirect,     // from FP32
  kBf16First,  // rounded to bf16, then quantised
};

struct Numerics {
  Scheme scheme = Scheme::kW4A16;
  ActScaleChoice a1 = ActScaleChoice::kScalar, a2 = ActScaleChoice::kScalar;  // kW4A4 only, as the next
  IntermediateRounding intermediate = IntermediateRounding::kDirect;
  Act8 act8 = Act8::kInt8Block;  // kW4A8 only

  bool is_fp8() const { return scheme == Scheme::kW4A8 && act8 == Act8::kFp8Token; }
  bool operator==(const Numerics&) const = default;
};

// "w4a16"; "w4a4 (scalar a1, per-expert a2, intermediate through bf16)"; "w4a8 (FP8 tokens)".
std::string numerics_text(const Numerics& numerics);

}  // namespace fp4moe
