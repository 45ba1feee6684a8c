#include "formats/weight_quantize.h"

#include <algorithm>
#include <cstring>

#include "formats/block_quantize.h"
#include "formats/e4m3.h"
#include "formats/e8m0.h"
#include "formats/mxfp4.h"
#include "formats/nvfp4.h"

namespace fp4moe {
namespace {

constexpr int kMaxBlock = 32;
constexpr uint8_t kE4m3Least = 0x01, kE4m3Most = 0x7e;

// A block quantised with one scale.
struct Quantised {
  uint8_t codes[kMaxBlock / 2];
  double error;  // sum of squares
};

double squared_error(const float* x, int n, const uint8_t* codes, float scale) {
  double sum = 0;
  for (int i = 0; i < n; ++i) {
    const uint8_t code = i % 2 == 0 ? e2m1_even(codes[i / 2]) : e2m1_odd(codes[i / 2]);
    const double d = double{x[i]} - double{e2m1_decode(code)} * scale;
    sum += d * d;
  }
  return sum;
}

Quantised quantise(const float* x, int n, float scale) {
  Quantised q;
  block_quantize::encode(x, n, 1.0f / scale, q.codes);
  q.error = squared_error(x, n, q.codes, scale);
  return q;
}

// Replaces codes and byte by those of the best scale byte in [first, last], if it is better. scale_of(byte):
// the value of code 1.
template <class ScaleOf>
void search(const float* x, int n, int first, int last, const ScaleOf& scale_of, uint8_t* codes,
            uint8_t& byte) {
  double least = squared_error(x, n, codes, scale_of(byte));
  for (int candidate = first; candidate <= last; ++candidate) {
    const float scale = scale_of(static_cast<uint8_t>(candidate));
    const Quantised q = quantise(x, n, scale);
    if (!(q.error < least)) continue;
    least = q.error;
    byte = static_cast<uint8_t>(candidate);
    std::memcpy(codes, q.codes, static_cast<size_t>(n / 2));
  }
}

// Tries the next lower scale: the largest elements saturate, all others get a grid twice as fine.
void search_mxfp4(const float* x, uint8_t* codes, uint8_t& byte) {
  const int finer = std::max(1, byte - 1);
  search(x, kMxfp4Block, finer, finer, e8m0_decode, codes, byte);
}

// Tries the scales that map the largest element to 3.5 (a coarse but even grid below it) to 8 (saturated).
void search_nvfp4(const float* x, float tensor_scale, uint8_t* codes, uint8_t& byte) {
  const float amax = block_quantize::amax(x, kNvfp4Block);
  const int first = std::max(kE4m3Least, e4m3_encode(amax / tensor_scale / 8.0f));
  const int last = std::min(kE4m3Most, e4m3_encode(amax / tensor_scale / 3.5f));
  const auto scale_of = [tensor_scale](uint8_t b) { return e4m3_decode(b) * tensor_scale; };
  search(x, kNvfp4Block, first, last, scale_of, codes, byte);
}

}  // namespace

void quantize_weight_row(Fp4Format format, const float* x, int64_t cols, DecodeScale tensor_scale,
                         ScaleSearch how, uint8_t* codes, uint8_t* scales) {
  const bool mxfp4 = format == Fp4Format::kMxfp4;
  if (mxfp4)
    mxfp4_quantize_row(x, cols, Mxfp4ScaleRule::kRoundUp, codes, scales);
  else
    nvfp4_quantize_row(x, cols, to_encode(tensor_scale), codes, scales);
  if (how == ScaleSearch::kAbsmax) return;
  const int block = fp4_block(format);
  for (int64_t b = 0; b < cols / block; ++b) {
    const float* from = x + b * block;
    if (block_quantize::amax(from, block) == 0) continue;
    uint8_t* to = codes + b * (block / 2);
    mxfp4 ? search_mxfp4(from, to, scales[b]) : search_nvfp4(from, tensor_scale.value, to, scales[b]);
  }
}

}  // namespace fp4moe
