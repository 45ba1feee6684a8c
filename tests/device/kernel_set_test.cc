#include "device/kernel_set.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace fp4moe {
namespace {

TEST(KernelSet, PreparesEachKernelOnce) {
  KernelSet set;
  std::vector<uint8_t> functions(KernelSet::kMaxKernels);  // up to 16 neighbours hash to the same slot
  std::vector<int> calls(functions.size());
  for (int round = 0; round < 3; ++round)
    for (size_t i = 0; i < functions.size(); ++i) set.once(&functions[i], [&] { ++calls[i]; });
  EXPECT_EQ(calls, std::vector<int>(functions.size(), 1));
}

TEST(KernelSet, SetsAreIndependent) {
  KernelSet first, second;
  const char function = 0;
  int calls = 0;
  for (KernelSet* set : {&first, &second, &first}) set->once(&function, [&] { ++calls; });
  EXPECT_EQ(calls, 2);
}

// A thread that finds a kernel in the set sees the effects of preparing it.
TEST(KernelSet, ThreadsWaitForThePreparation) {
  KernelSet set;
  std::vector<uint8_t> functions(100);
  std::vector<int> calls(functions.size());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (size_t i = 0; i < functions.size(); ++i) {
        set.once(&functions[i], [&] { ++calls[i]; });
        EXPECT_EQ(calls[i], 1);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(KernelSetDeathTest, TooManyKernelsAreABug) {
  KernelSet set;
  std::vector<uint8_t> functions(KernelSet::kMaxKernels + 1);
  for (size_t i = 0; i < KernelSet::kMaxKernels; ++i) set.once(&functions[i], [] {});
  EXPECT_DEATH(set.once(&functions.back(), [] {}), "255 kernels have been prepared");
}

}  // namespace
}  // namespace fp4moe
