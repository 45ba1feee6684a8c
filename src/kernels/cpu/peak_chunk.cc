// Reads and dot products at one ISA's full width, for `fp4moe bench peak`.
//
// Computes: results are discarded.
// Bytes:    read: num_bytes; dots: none.
// Flops:    read: none; dots: CpuDot::flops per round.
// Bound:    read: the memory (or the cache) that holds the data; dots: the multipliers.
// Numerics: values stay finite and normal, so that no microcode assist slows an instruction.
#include "kernels/cpu/peak_chunk.h"

#include "kernels/cpu/vec.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif
using Words = uint64_t __attribute__((vector_size(kRegisterBytes)));

void read(const uint8_t* data, int64_t num_bytes) {
  constexpr int kStep = 256, kLine = 64, kAhead = 4096, kSums = 4;
  Words sums[kSums] = {};
  for (const uint8_t* end = data + num_bytes; data < end; data += kStep) {
    for (int i = 0; i < kStep; i += kLine) __builtin_prefetch(data + kAhead + i);
    for (int i = 0; i < kStep / kRegisterBytes; ++i)
      sums[i % kSums] ^= *reinterpret_cast<const Words*>(data + i * kRegisterBytes);
  }
  const Words all = (sums[0] ^ sums[1]) ^ (sums[2] ^ sums[3]);
  uint64_t word = 0;
  for (int i = 0; i < kRegisterBytes / 8; ++i) word ^= all[i];
  asm volatile("" : : "r"(word));
}

// Computes x = x * b + c, which stays near 1.
constexpr int kFmaChains = 12 * kRegisterBytes / 64;
void fma_dots(int64_t rounds) {
  const Vec b = broadcast(0.5f), c = broadcast(0.5f);
  Vec x[kFmaChains];
  for (int i = 0; i < kFmaChains; ++i) x[i] = broadcast(1.0f + 0.125f * static_cast<float>(i));
  for (int64_t r = 0; r < rounds; ++r)
    for (int i = 0; i < kFmaChains; ++i) x[i] = fma(x[i], b, c);
  float sums[kLanes];
  for (int i = 1; i < kFmaChains; ++i) x[0] = add(x[0], x[i]);
  store(sums, x[0]);
  asm volatile("" : : "r"(sums) : "memory");
}
constexpr CpuDot kFma = {"f32 multiply-add", 2 * kLanes* kFmaChains, fma_dots};

#if defined(__AVX512BF16__)
constexpr int kChains = 16;

template <class Register, class Dot>
void chains(int64_t rounds, Register start, const Dot& dot) {
  Register x[kChains];
  for (Register& chain : x) chain = start;
  for (int64_t r = 0; r < rounds; ++r)
    for (Register& chain : x) chain = dot(chain);
  for (Register& chain : x) asm volatile("" : : "v"(chain));
}

void bf16_dots(int64_t rounds) {
  const auto a = (__m512bh)_mm512_set1_epi16(0x3f80), b = (__m512bh)_mm512_set1_epi16(0x3c00);  // 1, 1/128
  chains(rounds, _mm512_setzero_ps(), [&](__m512 x) { return _mm512_dpbf16_ps(x, a, b); });
}

void int8_dots(int64_t rounds) {
  const __m512i a = _mm512_set1_epi8(77), b = _mm512_set1_epi8(-5);
  chains(rounds, _mm512_setzero_si512(), [&](__m512i x) { return _mm512_dpbusd_epi32(x, a, b); });
}

constexpr CpuDot kBf16 = {"vdpbf16ps, 512 bits", 2 * 32 * kChains, bf16_dots};
constexpr CpuDot kInt8 = {"vpdpbusd, 512 bits", 2 * 64 * kChains, int8_dots};
#elif defined(__AVX2__)
// Each step computes 16-bit sums of two products, then 32-bit sums of two such sums, and adds those to a
// total.
constexpr int kInt8Chains = 8;
void int8_dots(int64_t rounds) {
  const __m256i b = _mm256_set1_epi8(-5), ones = _mm256_set1_epi16(1);
  __m256i a = _mm256_set1_epi8(77), x[kInt8Chains] = {};
  for (int64_t r = 0; r < rounds; ++r) {
    for (__m256i& chain : x) {
      asm volatile("" : "+x"(a));  // otherwise the products are hoisted out of the loop
      chain = _mm256_add_epi32(chain, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
    }
  }
  for (__m256i& chain : x) asm volatile("" : : "x"(chain));
}

constexpr CpuDot kBf16 = kFma;
constexpr CpuDot kInt8 = {"vpmaddubsw, vpmaddwd and vpaddd, 256 bits", 2 * 32 * kInt8Chains, int8_dots};
#else
constexpr CpuDot kBf16 = kFma, kInt8 = kFma;
#endif

}  // namespace

#define FP4MOE_STRING_(x) #x
#define FP4MOE_STRING(x) FP4MOE_STRING_(x)

extern const PeakChunks kPeakChunks;
const PeakChunks kPeakChunks = {
    {.name = FP4MOE_STRING(FP4MOE_ISA), .f32 = kFma, .bf16 = kBf16, .int8 = kInt8}, read};

}  // namespace fp4moe::FP4MOE_ISA
