// The panel layout of the CPU expert kernels, the same for every ISA. A panel has 16 weight rows r side by
// side, with K columns in blocks of G = fp4_block(format):
//
//   scales  [K / G][16] bytes, padded to a multiple of 64
//   codes   [K / 8][16] words of 32 bits: word (j, r) holds columns 8 j .. 8 j + 7 of row r
//
//   word (j, r), four bits each, low to high:   8j+0  8j+2  8j+4  8j+6 | 8j+1  8j+3  8j+5  8j+7
//
// After a right shift by 4 i, the two halves of each word have columns 8 j + 2 i and 8 j + 2 i + 1 in their
// lowest four bits: the pair that one bf16 dot instruction needs, ready for a table look-up by 16-bit index.
#pragma once

#include <cstdint>

#include "kernels/expert_ops.h"

namespace fp4moe {

// Byte i of each group of eight in a kI8 row is column kInt8Columns[i] of the group: the order of the low
// nibbles, then of the high nibbles, of the bytes of a word above.
static constexpr int kInt8Columns[8] = {0, 4, 1, 5, 2, 6, 3, 7};

// Block scales and starts of kI8 rows [rows, K] (kernels/act_quant.h); null for other rows.
struct Int8Blocks {
  const float* scales = nullptr;    // [rows, K / block]
  const int32_t* starts = nullptr;  // [rows, K / block]
};

// static: sources of every ISA use these, and each must keep its own copy.
static constexpr int64_t expert_panel_scale_bytes(Fp4Format format, int64_t k) {
  return (k / (format == Fp4Format::kMxfp4 ? 32 : 16) * kPanelRows + 63) / 64 * 64;
}

static constexpr int64_t expert_panel_bytes(Fp4Format format, int64_t k) {
  return expert_panel_scale_bytes(format, k) + k / 8 * kPanelRows * 4;
}

void pack_expert_panel(const Fp4MatrixView& w, int64_t panel, uint8_t* dst);

}  // namespace fp4moe
