// The per-tensor scale of NVFP4. Its two directions are two types, because mixing them up is silent.
#pragma once

#include <cstdint>

namespace fp4moe {

enum class ScaleDirection : uint8_t {
  kEncode,  // 2688 / amax: what quantisers multiply by
  kDecode,  // amax / 2688: what dequantisers multiply by; checkpoints store this one
};

template <ScaleDirection direction>
struct TensorScale {
  float value = 1;  // finite and positive (0 is a legal DecodeScale of an all-zero row)
};
using EncodeScale = TensorScale<ScaleDirection::kEncode>;
using DecodeScale = TensorScale<ScaleDirection::kDecode>;

// One IEEE division each. Not exact inverses of each other: keep the one that was given.
constexpr DecodeScale to_decode(EncodeScale s) { return {1.0f / s.value}; }
constexpr EncodeScale to_encode(DecodeScale s) { return {1.0f / s.value}; }

}  // namespace fp4moe
