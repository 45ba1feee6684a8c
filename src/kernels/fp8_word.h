// The codes of an FP8 weight on a GPU: words of four codes that become two bf16 pairs in few instructions.
#pragma once

#include <cstdint>

namespace fp4moe {

constexpr int64_t kFp8WordGroup = 16;  // columns of four words
// Bits of a word that are bits of the first pair, and those of the second after a shift to the left and to
// the right by 4.
constexpr uint32_t kFp8FirstPair = 0x87f087f0u, kFp8SecondLeft = 0x80f080f0u, kFp8SecondRight = 0x07000700u;

// Half h of word q of a group holds column 2 q + h (`first`) and column 8 + 2 q + h (`second`): the columns
// of lane q of an mma.m16n8k16 operand. The sign of `first` is bit 15, its other bits are 10 to 4, as in a
// bf16 that is 2^120 times too small. The sign of `second` is bit 11, the next three bits are 14 to 12, and
// the last four 3 to 0.
constexpr uint32_t fp8_half_word(uint32_t first, uint32_t second) {
  return (first & 0x80) << 8 | (first & 0x7f) << 4 | (second & 0x80) << 4 | (second & 0x70) << 8 |
         (second & 0x0f);
}
// Returns word q of a group's codes.
constexpr uint32_t fp8_word(const uint8_t* group, int q) {
  return fp8_half_word(group[2 * q], group[8 + 2 * q]) | fp8_half_word(group[2 * q + 1], group[9 + 2 * q])
                                                             << 16;
}

}  // namespace fp4moe
