#include "kernels/cpu_peak.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <string>
#include <vector>

namespace fp4moe {
namespace {

std::vector<const CpuPeakOps*> all_ops() {
  std::vector<const CpuPeakOps*> list;
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512})
    if (isa_available(isa)) list.push_back(&cpu_peak_ops(isa));
  if (amx_peak_ops() != nullptr) list.push_back(amx_peak_ops());
  return list;
}

TEST(CpuPeakTest, EveryLevelHasItsOwnLoops) {
  EXPECT_STREQ(cpu_peak_ops(Isa::kScalar).name, "cpu_scalar");
  if (isa_available(Isa::kAvx2)) {
    EXPECT_STREQ(cpu_peak_ops(Isa::kAvx2).name, "cpu_avx2");
  }
  if (isa_available(Isa::kAvx512)) {
    EXPECT_STREQ(cpu_peak_ops(Isa::kAvx512).name, "cpu_avx512");
  }
}

// A round has at least as many int8 products as bf16 products at every ISA level.
TEST(CpuPeakTest, DotsRunAndCountTheirFlops) {
  for (const CpuPeakOps* ops : all_ops()) {
    for (const CpuDot& dot : {ops->bf16, ops->int8}) {
      SCOPED_TRACE(std::string(ops->name) + " " + dot.name);
      EXPECT_GT(dot.flops, 0);
      dot.run(0);
      dot.run(3);
    }
    EXPECT_EQ(ops->f32.run == nullptr, ops == amx_peak_ops()) << ops->name;
    if (ops->f32.run != nullptr) ops->f32.run(3);
    EXPECT_GE(ops->int8.flops, ops->bf16.flops) << ops->name;
  }
}

// Reads the whole range and nothing after it: the next page is inaccessible.
TEST(CpuReadTest, ReadsToTheEndAndNoFurther) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  constexpr size_t kPage = 4096, kReadable = 2 * kPage;
  auto* const pages = static_cast<uint8_t*>(
      mmap(nullptr, kReadable + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(pages, MAP_FAILED);
  ASSERT_EQ(mprotect(pages + kReadable, kPage, PROT_NONE), 0);
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAmx}) {
    if (!isa_available(isa)) continue;
    cpu_read(isa, pages, kReadable);
    cpu_read(isa, pages + kReadable - 1024, 1024);
    EXPECT_DEATH(cpu_read(isa, pages + kReadable - 1024, 2048), "") << isa_name(isa);
  }
  munmap(pages, kReadable + kPage);
}

}  // namespace
}  // namespace fp4moe
