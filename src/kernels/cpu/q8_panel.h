// The panel layout of 8-bit dense weights (LinearLayout::kPanel16Q8), the same for every ISA. A panel has 16
// output rows r side by side, in B = ceil(K / 32) blocks (formats/q8.h):
//
//   scales  [B][16] bf16, padded to a multiple of 64 bytes
//   codes   [8 B][64] bytes: four neighbouring k of 16 rows; sign and magnitude (bit 7, bits 6-0)
//
//   byte of row r, k = 4 j + c, within 64:   16 (r / 4) + 8 (c / 2) + 2 (r % 4) + c % 2
//
// Interleaving the decoded low and high bytes within each 16-byte lane (vpunpcklbw, vpunpckhbw) gives pairs
// of k for 16 rows in order: the operands of vdpbf16ps.
#pragma once

#include <cstdint>

namespace fp4moe {

// static: sources of every ISA use these, and each must keep its own copy.
static constexpr int64_t q8_panel_scale_bytes(int64_t k) { return ((k + 31) / 32 * 32 + 63) / 64 * 64; }
static constexpr int64_t q8_panel_bytes(int64_t k) { return q8_panel_scale_bytes(k) + (k + 31) / 32 * 512; }
static constexpr int64_t q8_code_place(int64_t row, int64_t column) {
  return row / 4 * 16 + column / 2 * 8 + row % 4 * 2 + column % 2;
}

}  // namespace fp4moe
