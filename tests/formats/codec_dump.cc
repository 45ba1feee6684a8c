// Driven by ml_dtypes_test.py. For each float32 on stdin (native byte order) writes 24 bytes to stdout: its
// codes (u8 e2m1, u8 e4m3, u8 e8m0 rounded up, u8 e8m0 by the OCP rule, u16 bf16, u16 zero), then four
// float32: the float's low byte decoded as e2m1, as e4m3 and as e8m0, and its low half decoded as bf16.
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "formats/bf16.h"
#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/e8m0.h"

namespace {

struct Record {
  uint8_t e2m1, e4m3, e8m0_round_up, e8m0_ocp_floor;
  uint16_t bf16, zero;
  float e2m1_value, e4m3_value, e8m0_value, bf16_value;
};
static_assert(sizeof(Record) == 24);

Record record(float x) {
  using namespace fp4moe;
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const auto byte = static_cast<uint8_t>(bits);
  return {.e2m1 = e2m1_encode(x),
          .e4m3 = e4m3_encode(x),
          .e8m0_round_up = e8m0_encode_round_up(std::abs(x)),
          .e8m0_ocp_floor = e8m0_encode_ocp_floor(std::abs(x)),
          .bf16 = float_to_bf16(x).bits,
          .zero = 0,
          .e2m1_value = e2m1_decode(byte),
          .e4m3_value = e4m3_decode(byte),
          .e8m0_value = e8m0_decode(byte),
          .bf16_value = bf16_to_float({static_cast<uint16_t>(bits)})};
}

}  // namespace

int main() {
  float x;
  while (std::fread(&x, sizeof x, 1, stdin) == 1) {
    const Record r = record(x);
    if (std::fwrite(&r, sizeof r, 1, stdout) != 1) return 1;
  }
  return std::ferror(stdin) != 0;
}
