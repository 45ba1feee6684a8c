// Numerics of GEMMs with FP4 weights: the scheme, and the details in which runners differ.
#pragma once

#include <cstdint>
#include <string>

namespace fp4moe {

// Weights are FP4; the scheme names the activations.
enum class Scheme : uint8_t {
  kW4A16,  // bf16 (or f32 with --dtype float32), FP32 accumulation and tensor scales
  kW4A4,   // NVFP4 activations
  kW4A8,   // 8-bit activations, see Act8
};
const char* scheme_name(Scheme scheme);  // "w4a16", "w4a4", "w4a8"

// Type of w4a8's activations. The runner decides: INT8 on a CPU, FP8 on a GPU.
enum class Act8 : uint8_t {
  kInt8Block,  // INT8, one scale per block of K
  kFp8Token,   // e4m3, one scale per token; weights are folded into e4m3 operands (docs/numerics.md)
};

// Which tensor scale the w4a4 quantiser uses.
enum class ActScaleChoice : uint8_t {
  kScalar,     // one per layer, the same on every rank: the largest input scale of all E experts
  kPerExpert,  // one per expert
  kPerToken,   // amax / 2688 of each row (a2: of the rank's part of I); needs no calibration
};

// Type from which w4a4 quantises the intermediate (after the activation function).
enum class IntermediateRounding : uint8_t {
  kDirect,     // from FP32
  kBf16First,  // from FP32 rounded to bf16
};

struct Numerics {
  Scheme scheme = Scheme::kW4A16;
  // kW4A4 only: tensor scales of x (a1) and of the intermediate (a2).
  ActScaleChoice a1 = ActScaleChoice::kScalar, a2 = ActScaleChoice::kScalar;
  IntermediateRounding intermediate = IntermediateRounding::kDirect;  // kW4A4 only
  Act8 act8 = Act8::kInt8Block;                                       // kW4A8 only

  bool is_fp8() const { return scheme == Scheme::kW4A8 && act8 == Act8::kFp8Token; }
  bool operator==(const Numerics&) const = default;
};

// "w4a16"; "w4a4 (scalar a1, per-expert a2, intermediate through bf16)"; "w4a8 (FP8 tokens)".
std::string numerics_text(const Numerics& numerics);

}  // namespace fp4moe
