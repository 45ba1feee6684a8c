// The per-tensor scale of NVFP4. The two directions are different types, so that they cannot be confused.
#pragma once

#include <cstdint>

namespace fp4moe {

enum class ScaleDirection : uint8_t {
  kEncode,  // 2688 / amax: the factor of quantisers
  kDecode,  // amax / 2688: the factor of dequantisers; stored in checkpoints
};

template <ScaleDirection direction>
struct TensorScale {
  float value = 1;  // finite and positive (0 is also valid as the DecodeScale of an all-zero row)
};
using EncodeScale = TensorScale<ScaleDirection::kEncode>;
using DecodeScale = TensorScale<ScaleDirection::kDecode>;

// Each is one IEEE division. They are not exact inverses, so keep the original value.
constexpr DecodeScale to_decode(EncodeScale s) { return {1.0f / s.value}; }
constexpr EncodeScale to_encode(DecodeScale s) { return {1.0f / s.value}; }

}  // namespace fp4moe
