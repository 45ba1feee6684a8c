#include "base/cpu_info.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <thread>

namespace fp4moe {
namespace {

TEST(CpuInfo, IsaNamesRoundTrip) {
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAmx})
    EXPECT_EQ(*parse_isa(isa_name(isa)), isa);
  EXPECT_EQ(parse_isa("avx").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(parse_isa("AVX2").status().code(), StatusCode::kInvalidArgument);
}

TEST(CpuInfo, LevelsIncludeTheLowerOnes) {
  EXPECT_TRUE(isa_available(Isa::kScalar));
  EXPECT_TRUE(isa_available(best_isa()));
  for (Isa isa : {Isa::kAvx2, Isa::kAvx512, Isa::kAmx}) EXPECT_EQ(isa_available(isa), isa <= best_isa());
}

// /proc/cpuinfo is the kernel's decoding of cpuid, an independent reference.
TEST(CpuInfo, BestIsaAgreesWithTheKernel) {
  if (std::getenv("FP4MOE_ISA") != nullptr) GTEST_SKIP() << "FP4MOE_ISA limits the ISA";
  std::ifstream file("/proc/cpuinfo");
  std::stringstream text;
  text << file.rdbuf();
  const std::string flags = text.str();
  auto has = [&](const char* flag) { return flags.find(std::string(" ") + flag + " ") != std::string::npos; };
  Isa expected = Isa::kScalar;
  if (has("avx2") && has("fma") && has("f16c")) expected = Isa::kAvx2;
  if (expected == Isa::kAvx2 && has("avx512f") && has("avx512bw") && has("avx512dq") && has("avx512vl") &&
      has("avx512_vnni") && has("avx512_bf16"))
    expected = Isa::kAvx512;
  if (expected == Isa::kAvx512 && has("amx_tile") && has("amx_bf16") && has("amx_int8")) expected = Isa::kAmx;
  EXPECT_EQ(best_isa(), expected);
}

TEST(CpuInfo, CoresAndMemoryArePlausible) {
  EXPECT_GE(available_cores(), 1);
  EXPECT_LE(available_cores(), static_cast<int>(std::thread::hardware_concurrency()));
  EXPECT_GT(available_memory_bytes(), 1 << 20);
  EXPECT_FALSE(cpu_model_name().empty());
}

// Otherwise a KV pool is planned that ulimit -v does not let the process allocate.
TEST(CpuInfo, LimitsOfTheProcessCount) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer maps more than these limits";
#endif
  for (const auto resource : {RLIMIT_AS, RLIMIT_DATA}) {
    rlimit before{};
    ASSERT_EQ(getrlimit(resource, &before), 0);
    const rlimit tight{.rlim_cur = rlim_t{1} << 33, .rlim_max = before.rlim_max};
    ASSERT_EQ(setrlimit(resource, &tight), 0);
    EXPECT_LT(available_memory_bytes(), int64_t{1} << 33);
    ASSERT_EQ(setrlimit(resource, &before), 0);
  }
}

// The C library determines the level-1 size independently. The last level must not be smaller, and its size
// must be plausible.
TEST(CpuInfo, LastLevelCacheIsPlausible) {
  const int64_t num_bytes = last_level_cache_bytes();
  if (num_bytes == 0) GTEST_SKIP() << "the system does not report the cache size";
  EXPECT_GE(num_bytes, std::max<int64_t>(sysconf(_SC_LEVEL1_DCACHE_SIZE), 8 << 10));
  EXPECT_LE(num_bytes, int64_t{16} << 30);
}

}  // namespace
}  // namespace fp4moe
