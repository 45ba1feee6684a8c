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

// A block's elements with its codes and its scale byte.
struct Block {
  const float* x;
  uint8_t* codes;
  uint8_t& byte;
};

// Replaces the codes and scale byte of a block of N elements with those of the best scale byte in [first,
// last], if that reduces the error. scale_of(byte) is the scale by which a code's value is multiplied.
template <int N, class ScaleOf>
void search(const Block& block, int first, int last, const ScaleOf& scale_of) {
  double least = squared_error(block.x, N, block.codes, scale_of(block.byte));
  for (int candidate = first; candidate <= last; ++candidate) {
    const float scale = scale_of(static_cast<uint8_t>(candidate));
    const Quantised q = quantise(block.x, N, scale);
    if (!(q.error < least)) continue;
    least = q.error;
    block.byte = static_cast<uint8_t>(candidate);
    std::memcpy(block.codes, q.codes, N / 2);
  }
}

// Tries the next lower scale: the largest elements saturate, but all other elements get a grid twice as fine.
void search_mxfp4(const Block& block) {
  const int finer = std::max(1, block.byte - 1);
  search<kMxfp4Block>(block, finer, finer, e8m0_decode);
}

// Tries the scales that map the largest element to 3.5 (a coarse but even grid below it) to 8 (saturated).
void search_nvfp4(const Block& block, float tensor_scale) {
  const float amax = block_quantize::amax(block.x, kNvfp4Block);
  const int first = std::max(kE4m3Least, e4m3_encode(amax / tensor_scale / 8.0f));
  const int last = std::min(kE4m3Most, e4m3_encode(amax / tensor_scale / 3.5f));
  const auto scale_of = [tensor_scale](uint8_t b) { return e4m3_decode(b) * tensor_scale; };
  search<kNvfp4Block>(block, first, last, scale_of);
}

}  // namespace

void quantize_weight_row(Fp4Format format, std::span<const float> x, DecodeScale tensor_scale,
                         ScaleSearch how, uint8_t* codes, uint8_t* scales) {
  const bool mxfp4 = format == Fp4Format::kMxfp4;
  const int64_t cols = std::ssize(x);
  if (mxfp4)
    mxfp4_quantize_row(x.data(), cols, Mxfp4ScaleRule::kRoundUp, codes, scales);
  else
    nvfp4_quantize_row(x.data(), cols, to_encode(tensor_scale), codes, scales);
  if (how == ScaleSearch::kAbsmax) return;
  const int n = fp4_block(format);
  for (int64_t b = 0; b < cols / n; ++b) {
    const Block block{x.data() + b * n, codes + b * (n / 2), scales[b]};
    if (block_quantize::amax(block.x, n) == 0) continue;
    mxfp4 ? search_mxfp4(block) : search_nvfp4(block, tensor_scale.value);
  }
}

}  // namespace fp4moe
