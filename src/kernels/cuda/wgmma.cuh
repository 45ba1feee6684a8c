// wgmma (PTX ISA 9.7.15) with A in registers: m64nNk16, bf16 inputs, f32 sums. Device code only.
#pragma once

#include "kernels/cuda/wgmma_order.cuh"

namespace fp4moe {

// Has a's values made before what comes next.
__device__ __forceinline__ void keep_registers(uint32_t (&a)[4]) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

// d += A B: A [64, 16] as m16n8k16 fragments by warp, B [N, 16] in shared memory. d[4 j + i] is row 16 warp +
// lane / 4 + 8 (i / 2), column 8 j + 2 (lane % 4) + i % 2.
template <int N>
struct Wgmma;

// clang-format off
#define FP4MOE_D4(o) "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3])
#define FP4MOE_WGMMA(n, regs, a_and_b, ...)                                                                   \
  template <>                                                                                                 \
  struct Wgmma<n> {                                                                                           \
    template <int kCount> /* at least n / 2; the rest of d is left alone */                                   \
    static __device__ __forceinline__ void add(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b) {      \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" regs "}, " a_and_b            \
                   ", 1, 1, 1, 0;"                                                                            \
                   : __VA_ARGS__                                                                              \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                     \
    }                                                                                                         \
  };
FP4MOE_WGMMA(16,
  "%0, %1, %2, %3, %4, %5, %6, %7",
  "{%8, %9, %10, %11}, %12",
  FP4MOE_D4(0), FP4MOE_D4(4))
FP4MOE_WGMMA(32,
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
  "{%16, %17, %18, %19}, %20",
  FP4MOE_D4(0), FP4MOE_D4(4), FP4MOE_D4(8), FP4MOE_D4(12))
FP4MOE_WGMMA(48,
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
  "%16, %17, %18, %19, %20, %21, %22, %23",
  "{%24, %25, %26, %27}, %28",
  FP4MOE_D4(0), FP4MOE_D4(4), FP4MOE_D4(8), FP4MOE_D4(12), FP4MOE_D4(16), FP4MOE_D4(20))
FP4MOE_WGMMA(64,
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
  "{%32, %33, %34, %35}, %36",
  FP4MOE_D4(0), FP4MOE_D4(4), FP4MOE_D4(8), FP4MOE_D4(12), FP4MOE_D4(16), FP4MOE_D4(20), FP4MOE_D4(24), FP4MOE_D4(28))
FP4MOE_WGMMA(80,
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
  "%32, %33, %34, %35, %36, %37, %38, %39",
  "{%40, %41, %42, %43}, %44",
  FP4MOE_D4(0), FP4MOE_D4(4), FP4MOE_D4(8), FP4MOE_D4(12), FP4MOE_D4(16), FP4MOE_D4(20), FP4MOE_D4(24), FP4MOE_D4(28),
  FP4MOE_D4(32), FP4MOE_D4(36))
FP4MOE_WGMMA(96,
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47",
  "{%48, %49, %50, %51}, %52",
  FP4MOE_D4(0), FP4MOE_D4(4), FP4MOE_D4(8), FP4MOE_D4(12), FP4MOE_D4(16), FP4MOE_D4(20), FP4MOE_D4(24), FP4MOE_D4(28),
  FP4MOE_D4(32), FP4MOE_D4(36), FP4MOE_D4(40), FP4MOE_D4(44))
FP4MOE_WGMMA(112,
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
  "%48, %49, %50, %51, %52, %53, %54, %55",
  "{%56, %57, %58, %59}, %60",
  FP4MOE_D4(0), FP4MOE_D4(4), FP4MOE_D4(8), FP4MOE_D4(12), FP4MOE_D4(16), FP4MOE_D4(20), FP4MOE_D4(24), FP4MOE_D4(28),
  FP4MOE_D4(32), FP4MOE_D4(36), FP4MOE_D4(40), FP4MOE_D4(44), FP4MOE_D4(48), FP4MOE_D4(52))
FP4MOE_WGMMA(128,
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63",
  "{%64, %65, %66, %67}, %68",
  FP4MOE_D4(0), FP4MOE_D4(4), FP4MOE_D4(8), FP4MOE_D4(12), FP4MOE_D4(16), FP4MOE_D4(20), FP4MOE_D4(24), FP4MOE_D4(28),
  FP4MOE_D4(32), FP4MOE_D4(36), FP4MOE_D4(40), FP4MOE_D4(44), FP4MOE_D4(48), FP4MOE_D4(52), FP4MOE_D4(56), FP4MOE_D4(60))
#undef FP4MOE_WGMMA
#undef FP4MOE_D4
// clang-format on

}  // namespace fp4moe
