#include "inspect/doctor_checks.h"

#include <gtest/gtest.h>

#include <functional>

namespace fp4moe {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

MachineFacts sound() {
  MachineFacts f;
  f.cpu = "A CPU";
  f.isa = Isa::kAvx512;
  f.online_cores = f.usable_cores = 8;
  f.governor = "performance";
  f.huge_pages = "madvise";
  f.memory_bytes = 64 * kGiB;
  f.available_bytes = 60 * kGiB;
  f.memlock_bytes = -1;
  f.open_files = 65536;
  f.cache_folder = "/home/a/.cache/fp4moe";
  f.cache_free_bytes = 100 * kGiB;
  f.gpu = "A GPU";
  f.libraries = {{"nccl", "/usr/lib/libnccl.so.2", ""}};
  f.mpirun = "/usr/bin/mpirun";
  f.port = 30000;
  return f;
}

TEST(Doctor, ASoundMachineIsOkAndNothingIsToBeMended) {
  for (const Check& check : judge(sound())) {
    EXPECT_EQ(check.level, CheckLevel::kOk) << check.name;
    EXPECT_FALSE(check.detail.empty()) << check.name;
    EXPECT_TRUE(check.fix.empty()) << check.name;
  }
}

// Each problem is reported once under its name, with a fix.
TEST(Doctor, EveryFlawIsNamedAndMendable) {
  struct Flaw {
    const char* name;
    CheckLevel level;
    const char* detail;
    std::function<void(MachineFacts&)> make;
  };
  const Flaw flaws[] = {
      {"cpu", CheckLevel::kWarn, "scalar", [](MachineFacts& f) { f.isa = Isa::kScalar; }},
      {"cores", CheckLevel::kWarn, "2 of 8", [](MachineFacts& f) { f.usable_cores = 2; }},
      {"numa", CheckLevel::kWarn, "2 nodes", [](MachineFacts& f) { f.numa_nodes = 2; }},
      {"numa", CheckLevel::kWarn, "move", [](MachineFacts& f) { f.numa_nodes = 2, f.balances_numa = true; }},
      {"frequency", CheckLevel::kWarn, "powersave", [](MachineFacts& f) { f.governor = "powersave"; }},
      {"huge_pages", CheckLevel::kWarn, "never", [](MachineFacts& f) { f.huge_pages = "never"; }},
      {"memory", CheckLevel::kWarn, "1.00 GiB of 64.00 GiB",
       [](MachineFacts& f) { f.available_bytes = kGiB; }},
      {"memlock", CheckLevel::kWarn, "8.00 GiB", [](MachineFacts& f) { f.memlock_bytes = 8 * kGiB; }},
      {"open_files", CheckLevel::kWarn, "1024", [](MachineFacts& f) { f.open_files = 1024; }},
      {"cache", CheckLevel::kWarn, "no folder", [](MachineFacts& f) { f.cache_folder.clear(); }},
      {"cache", CheckLevel::kWarn, "Read-only", [](MachineFacts& f) { f.cache_error = "Read-only"; }},
      {"cache", CheckLevel::kWarn, "1.00 GiB free", [](MachineFacts& f) { f.cache_free_bytes = kGiB; }},
      {"port", CheckLevel::kFail, "30000: in use", [](MachineFacts& f) { f.port_error = "in use"; }},
      {"nccl", CheckLevel::kFail, "not found", [](MachineFacts& f) { f.libraries[0].error = "not found"; }},
      {"gpu", CheckLevel::kFail, "too old",
       [](MachineFacts& f) { f.gpu.clear(), f.has_gpu_file = true, f.gpu_error = "too old"; }},
  };
  for (const Flaw& flaw : flaws) {
    MachineFacts f = sound();
    flaw.make(f);
    std::vector<Check> bad;
    for (const Check& check : judge(f))
      if (check.level != CheckLevel::kOk) bad.push_back(check);
    ASSERT_EQ(bad.size(), 1U) << flaw.name << ": " << flaw.detail;
    EXPECT_EQ(bad[0].name, flaw.name);
    EXPECT_EQ(bad[0].level, flaw.level) << flaw.name;
    EXPECT_NE(bad[0].detail.find(flaw.detail), std::string::npos) << bad[0].detail;
    EXPECT_FALSE(bad[0].fix.empty()) << flaw.name;
  }
}

TEST(Doctor, AMachineWithoutAGpuNeedsNoneOfItsLibraries) {
  MachineFacts f = sound();
  f.gpu.clear();
  f.gpu_error = "no driver";
  f.libraries[0].error = "not found";
  f.mpirun.clear();
  for (const Check& check : judge(f)) EXPECT_EQ(check.level, CheckLevel::kOk) << check.name;
}

}  // namespace
}  // namespace fp4moe
