#include "moe/a2a_wire.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/nvfp4.h"

namespace fp4moe {
namespace {

constexpr int64_t kFp8Block = 128;
constexpr float kLeastAmax = 1e-30f;  // of a block: its scale and the inverse stay finite

constexpr std::array<float, 256> kE4m3Values = [] {
  std::array<float, 256> values{};
  for (int code = 0; code < 256; ++code)
    values[static_cast<size_t>(code)] = e4m3_decode(static_cast<uint8_t>(code));
  return values;
}();

float to_float(float x) { return x; }
float to_float(bf16 x) { return bf16_to_float(x); }
void store(float x, float& out) { out = x; }
void store(float x, bf16& out) { out = float_to_bf16(x); }

int64_t fp8_blocks(int64_t cols) { return (cols + kFp8Block - 1) / kFp8Block; }

template <class T>
void encode_fp8_blocks(const T* x, int64_t cols, uint8_t* wire) {
  for (int64_t block = 0; block < fp8_blocks(cols); ++block) {
    const int64_t first = block * kFp8Block, last = std::min(cols, first + kFp8Block);
    float amax = kLeastAmax;
    for (int64_t i = first; i < last; ++i) {
      const float a = std::abs(to_float(x[i]));
      amax = a > amax ? a : amax;
    }
    const float scale = amax / kE4m3Max, inverse = kE4m3Max / amax;
    for (int64_t i = first; i < last; ++i) wire[i] = e4m3_encode(to_float(x[i]) * inverse);
    std::memcpy(wire + cols + block * 4, &scale, 4);
  }
}

template <class T>
void encode_values(const WireEncoder& e, const T* x, int64_t cols, uint8_t* wire) {
  switch (e.format) {
    case WireFormat::kF32:
      for (int64_t i = 0; i < cols; ++i) {
        const float value = to_float(x[i]);
        std::memcpy(wire + i * 4, &value, 4);
      }
      return;
    case WireFormat::kBf16:
      for (int64_t i = 0; i < cols; ++i) {
        const bf16 value = float_to_bf16(to_float(x[i]));
        std::memcpy(wire + i * 2, &value, 2);
      }
      return;
    case WireFormat::kFp8Block:
      return encode_fp8_blocks(x, cols, wire);
    case WireFormat::kFp8Plain:
      for (int64_t i = 0; i < cols; ++i) wire[i] = e4m3_encode(to_float(x[i]));
      return;
    case WireFormat::kNvfp4: {
      uint8_t* scales = wire + cols / 2;
      DecodeScale scale = to_decode(e.nvfp4_scale);
      if (e.nvfp4_per_token)
        scale = nvfp4_quantize_row_per_token(x, cols, wire, scales);
      else
        nvfp4_quantize_row(x, cols, e.nvfp4_scale, wire, scales);
      std::memcpy(scales + cols / kNvfp4Block, &scale.value, 4);
      return;
    }
  }
}

template <class T>
float decode_values(WireFormat format, const uint8_t* wire, int64_t cols, T* out) {
  switch (format) {
    case WireFormat::kF32:
      for (int64_t i = 0; i < cols; ++i) {
        float value;
        std::memcpy(&value, wire + i * 4, 4);
        store(value, out[i]);
      }
      return 1;
    case WireFormat::kBf16:
      for (int64_t i = 0; i < cols; ++i) {
        bf16 value;
        std::memcpy(&value, wire + i * 2, 2);
        store(bf16_to_float(value), out[i]);
      }
      return 1;
    case WireFormat::kFp8Block:
      for (int64_t i = 0; i < cols; ++i) {
        float scale;
        std::memcpy(&scale, wire + cols + i / kFp8Block * 4, 4);
        store(kE4m3Values[wire[i]] * scale, out[i]);
      }
      return 1;
    case WireFormat::kFp8Plain:
      for (int64_t i = 0; i < cols; ++i) store(kE4m3Values[wire[i]], out[i]);
      return 1;
    case WireFormat::kNvfp4: {
      const uint8_t* scales = wire + cols / 2;
      for (int64_t i = 0; i < cols; i += 2) {
        const float scale = kE4m3Values[scales[i / kNvfp4Block]];
        store(e2m1_decode(e2m1_even(wire[i / 2])) * scale, out[i]);
        store(e2m1_decode(e2m1_odd(wire[i / 2])) * scale, out[i + 1]);
      }
      float row_scale;
      std::memcpy(&row_scale, scales + cols / kNvfp4Block, 4);
      return row_scale;
    }
  }
  return 1;
}

}  // namespace

int64_t wire_row_bytes(WireFormat format, int64_t cols) {
  switch (format) {
    case WireFormat::kF32:
      return cols * 4;
    case WireFormat::kBf16:
      return cols * 2;
    case WireFormat::kFp8Block:
      return cols + fp8_blocks(cols) * 4;
    case WireFormat::kFp8Plain:
      return cols;
    case WireFormat::kNvfp4:
      return cols / 2 + cols / kNvfp4Block + 4;
  }
  return 0;
}

void WireEncoder::encode(const void* x, DType dtype, int64_t cols, uint8_t* wire) const {
  if (dtype == DType::kBF16 ? format == WireFormat::kBf16 : format == WireFormat::kF32)
    std::memcpy(wire, x, static_cast<size_t>(wire_row_bytes(format, cols)));
  else if (dtype == DType::kBF16)
    encode_values(*this, static_cast<const bf16*>(x), cols, wire);
  else
    encode_values(*this, static_cast<const float*>(x), cols, wire);
}

float decode_wire_row(WireFormat format, const uint8_t* wire, int64_t cols, DType dtype, void* out) {
  if (dtype == DType::kBF16) return decode_values(format, wire, cols, static_cast<bf16*>(out));
  return decode_values(format, wire, cols, static_cast<float*>(out));
}

void add_wire_row(WireFormat format, const uint8_t* wire, int64_t first, int64_t n, float weight,
                  float* sum) {
  switch (format) {
    case WireFormat::kF32:
      for (int64_t i = 0; i < n; ++i) {
        float value;
        std::memcpy(&value, wire + (first + i) * 4, 4);
        sum[i] += weight * value;
      }
      return;
    case WireFormat::kBf16:
      for (int64_t i = 0; i < n; ++i) {
        bf16 value;
        std::memcpy(&value, wire + (first + i) * 2, 2);
        sum[i] += weight * bf16_to_float(value);
      }
      return;
    case WireFormat::kFp8Plain:
      for (int64_t i = 0; i < n; ++i) sum[i] += weight * kE4m3Values[wire[first + i]];
      return;
    case WireFormat::kFp8Block:
    case WireFormat::kNvfp4:
      FP4MOE_CHECK(false, "results travel as f32, bf16 or plain fp8");
  }
}

}  // namespace fp4moe
