#include "moe/transport/a2a_wire.h"

#include <array>
#include <cstring>

#include "base/check.h"
#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/fp8.h"
#include "formats/nvfp4.h"

namespace fp4moe {
namespace {

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
      return fp8_quantize_row(x, cols, wire, reinterpret_cast<float*>(wire + cols));
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
        std::memcpy(&scale, wire + cols + i / kFp8Group * 4, 4);
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
      return cols + fp8_num_groups(cols) * 4;
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
      FP4MOE_CHECK(false, "results are sent as f32, bf16 or plain fp8");
  }
}

}  // namespace fp4moe
