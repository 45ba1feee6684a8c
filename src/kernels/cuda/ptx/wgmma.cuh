// wgmma (PTX ISA 9.7.15): m64nNk16 of bf16, m64nNk32 of e4m3, f32 sums. Device code only.
#pragma once

#include "kernels/cuda/ptx/wgmma_order.cuh"

namespace fp4moe {

// Makes the compiler compute a's values before the code that follows.
__device__ __forceinline__ void keep_registers(uint32_t (&a)[4]) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

// Matrix products of a warpgroup, asynchronous. A is [64, 16], as m16n8k16 fragments per warp or, if it is a
// descriptor, in shared memory; B is [N, 16] in shared memory, or [16, N] if kTransposed is 1. d[4 j + i] is
// row 16 warp + lane / 4 + 8 (i / 2), column 8 j + 2 (lane % 4) + i % 2; it may have more than N / 2
// elements, and the others are kept.
//   multiply  d = A B, or d += A B if `accumulate`
//   add       d += A B, B not transposed
//   add_e4m3  the same with bytes: A is [64, 32], B is [N, 32]
template <int N>
struct Wgmma;

// Wgmma<N>::multiply with N = 2 kCount.
template <int kTransposed, int kCount, class A>
__device__ __forceinline__ void wgmma(float (&d)[kCount], const A& a, uint64_t b, bool accumulate) {
  Wgmma<2 * kCount>::template multiply<kTransposed>(d, a, b, accumulate);
}

// clang-format off
#define FP4MOE_D8(o) "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3]), "+f"(d[o + 4]), "+f"(d[o + 5]), "+f"(d[o + 6]), "+f"(d[o + 7])
#define FP4MOE_D4(o) "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3])
#define FP4MOE_4R(a, b, c, d) "%" #a ", %" #b ", %" #c ", %" #d
#define FP4MOE_8R(a, b, c, d, e, f, g, h) "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
// regs: d's operands; r0 to r6: the numbers of the operands after them; then d's constraints.
#define FP4MOE_WGMMA(n, regs, r0, r1, r2, r3, r4, r5, r6, ...)                                                \
  template <>                                                                                                 \
  struct Wgmma<n> {                                                                                           \
    template <int kTransposed, int kCount>                                                                    \
    static __device__ __forceinline__ void multiply(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b,   \
                                                    bool accumulate) {                                        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #r5 ", 0;\n"                                          \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" regs                          \
                   "}, {%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4 ", p, 1, 1, %" #r6 ";\n}"             \
                   : __VA_ARGS__                                                                              \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),   \
                     "n"(kTransposed));                                                                       \
    }                                                                                                         \
    template <int kTransposed, int kCount>                                                                    \
    static __device__ __forceinline__ void multiply(float (&d)[kCount], uint64_t a, uint64_t b,               \
                                                    bool accumulate) {                                        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #r2 ", 0;\n"                                          \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" regs                          \
                   "}, %" #r0 ", %" #r1 ", p, 1, 1, 0, %" #r3 ";\n}"                                          \
                   : __VA_ARGS__                                                                              \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransposed));                    \
    }                                                                                                         \
    template <int kCount, class A>                                                                            \
    static __device__ __forceinline__ void add(float (&d)[kCount], const A& a, uint64_t b) {                  \
      multiply<0>(d, a, b, true);                                                                             \
    }                                                                                                         \
    template <int kCount>                                                                                     \
    static __device__ __forceinline__ void add_e4m3(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" regs                          \
                   "}, {%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4 ", 1, 1, 1;"                          \
                   : __VA_ARGS__                                                                              \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                     \
    }                                                                                                         \
  };
#define FP4MOE_R0 FP4MOE_8R(0, 1, 2, 3, 4, 5, 6, 7)
#define FP4MOE_R1 FP4MOE_R0 ", " FP4MOE_8R(8, 9, 10, 11, 12, 13, 14, 15)
#define FP4MOE_R2 FP4MOE_R1 ", " FP4MOE_8R(16, 17, 18, 19, 20, 21, 22, 23)
#define FP4MOE_R3 FP4MOE_R2 ", " FP4MOE_8R(24, 25, 26, 27, 28, 29, 30, 31)
#define FP4MOE_R4 FP4MOE_R3 ", " FP4MOE_8R(32, 33, 34, 35, 36, 37, 38, 39)
#define FP4MOE_R5 FP4MOE_R4 ", " FP4MOE_8R(40, 41, 42, 43, 44, 45, 46, 47)
#define FP4MOE_R6 FP4MOE_R5 ", " FP4MOE_8R(48, 49, 50, 51, 52, 53, 54, 55)
#define FP4MOE_R7 FP4MOE_R6 ", " FP4MOE_8R(56, 57, 58, 59, 60, 61, 62, 63)
#define FP4MOE_R8 FP4MOE_R7 ", " FP4MOE_8R(64, 65, 66, 67, 68, 69, 70, 71)
#define FP4MOE_R9 FP4MOE_R8 ", " FP4MOE_8R(72, 73, 74, 75, 76, 77, 78, 79)
#define FP4MOE_R10 FP4MOE_R9 ", " FP4MOE_8R(80, 81, 82, 83, 84, 85, 86, 87)
#define FP4MOE_R11 FP4MOE_R10 ", " FP4MOE_8R(88, 89, 90, 91, 92, 93, 94, 95)
#define FP4MOE_R12 FP4MOE_R11 ", " FP4MOE_8R(96, 97, 98, 99, 100, 101, 102, 103)
#define FP4MOE_R13 FP4MOE_R12 ", " FP4MOE_8R(104, 105, 106, 107, 108, 109, 110, 111)
#define FP4MOE_R14 FP4MOE_R13 ", " FP4MOE_8R(112, 113, 114, 115, 116, 117, 118, 119)
#define FP4MOE_R15 FP4MOE_R14 ", " FP4MOE_8R(120, 121, 122, 123, 124, 125, 126, 127)
#define FP4MOE_A0 FP4MOE_D8(0)
#define FP4MOE_A1 FP4MOE_A0, FP4MOE_D8(8)
#define FP4MOE_A2 FP4MOE_A1, FP4MOE_D8(16)
#define FP4MOE_A3 FP4MOE_A2, FP4MOE_D8(24)
#define FP4MOE_A4 FP4MOE_A3, FP4MOE_D8(32)
#define FP4MOE_A5 FP4MOE_A4, FP4MOE_D8(40)
#define FP4MOE_A6 FP4MOE_A5, FP4MOE_D8(48)
#define FP4MOE_A7 FP4MOE_A6, FP4MOE_D8(56)
#define FP4MOE_A8 FP4MOE_A7, FP4MOE_D8(64)
#define FP4MOE_A9 FP4MOE_A8, FP4MOE_D8(72)
#define FP4MOE_A10 FP4MOE_A9, FP4MOE_D8(80)
#define FP4MOE_A11 FP4MOE_A10, FP4MOE_D8(88)
#define FP4MOE_A12 FP4MOE_A11, FP4MOE_D8(96)
#define FP4MOE_A13 FP4MOE_A12, FP4MOE_D8(104)
#define FP4MOE_A14 FP4MOE_A13, FP4MOE_D8(112)
#define FP4MOE_A15 FP4MOE_A14, FP4MOE_D8(120)
FP4MOE_WGMMA(16, FP4MOE_R0, 8, 9, 10, 11, 12, 13, 14, FP4MOE_A0)
FP4MOE_WGMMA(24, FP4MOE_R0 ", " FP4MOE_4R(8, 9, 10, 11), 12, 13, 14, 15, 16, 17, 18, FP4MOE_A0, FP4MOE_D4(8))
FP4MOE_WGMMA(32, FP4MOE_R1, 16, 17, 18, 19, 20, 21, 22, FP4MOE_A1)
FP4MOE_WGMMA(40, FP4MOE_R1 ", " FP4MOE_4R(16, 17, 18, 19), 20, 21, 22, 23, 24, 25, 26, FP4MOE_A1, FP4MOE_D4(16))
FP4MOE_WGMMA(48, FP4MOE_R2, 24, 25, 26, 27, 28, 29, 30, FP4MOE_A2)
FP4MOE_WGMMA(64, FP4MOE_R3, 32, 33, 34, 35, 36, 37, 38, FP4MOE_A3)
FP4MOE_WGMMA(80, FP4MOE_R4, 40, 41, 42, 43, 44, 45, 46, FP4MOE_A4)
FP4MOE_WGMMA(96, FP4MOE_R5, 48, 49, 50, 51, 52, 53, 54, FP4MOE_A5)
FP4MOE_WGMMA(112, FP4MOE_R6, 56, 57, 58, 59, 60, 61, 62, FP4MOE_A6)
FP4MOE_WGMMA(128, FP4MOE_R7, 64, 65, 66, 67, 68, 69, 70, FP4MOE_A7)
FP4MOE_WGMMA(144, FP4MOE_R8, 72, 73, 74, 75, 76, 77, 78, FP4MOE_A8)
FP4MOE_WGMMA(160, FP4MOE_R9, 80, 81, 82, 83, 84, 85, 86, FP4MOE_A9)
FP4MOE_WGMMA(176, FP4MOE_R10, 88, 89, 90, 91, 92, 93, 94, FP4MOE_A10)
FP4MOE_WGMMA(192, FP4MOE_R11, 96, 97, 98, 99, 100, 101, 102, FP4MOE_A11)
FP4MOE_WGMMA(208, FP4MOE_R12, 104, 105, 106, 107, 108, 109, 110, FP4MOE_A12)
FP4MOE_WGMMA(224, FP4MOE_R13, 112, 113, 114, 115, 116, 117, 118, FP4MOE_A13)
FP4MOE_WGMMA(240, FP4MOE_R14, 120, 121, 122, 123, 124, 125, 126, FP4MOE_A14)
FP4MOE_WGMMA(256, FP4MOE_R15, 128, 129, 130, 131, 132, 133, 134, FP4MOE_A15)
#undef FP4MOE_R0
#undef FP4MOE_A0
#undef FP4MOE_R1
#undef FP4MOE_A1
#undef FP4MOE_R2
#undef FP4MOE_A2
#undef FP4MOE_R3
#undef FP4MOE_A3
#undef FP4MOE_R4
#undef FP4MOE_A4
#undef FP4MOE_R5
#undef FP4MOE_A5
#undef FP4MOE_R6
#undef FP4MOE_A6
#undef FP4MOE_R7
#undef FP4MOE_A7
#undef FP4MOE_R8
#undef FP4MOE_A8
#undef FP4MOE_R9
#undef FP4MOE_A9
#undef FP4MOE_R10
#undef FP4MOE_A10
#undef FP4MOE_R11
#undef FP4MOE_A11
#undef FP4MOE_R12
#undef FP4MOE_A12
#undef FP4MOE_R13
#undef FP4MOE_A13
#undef FP4MOE_R14
#undef FP4MOE_A14
#undef FP4MOE_R15
#undef FP4MOE_A15
#undef FP4MOE_WGMMA
#undef FP4MOE_4R
#undef FP4MOE_8R
#undef FP4MOE_D4
#undef FP4MOE_D8
// clang-format on

}  // namespace fp4moe
