// The limits of control groups, read from trees of files as Linux has them.
#include "base/cgroup.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

namespace fp4moe {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

class Cgroup : public testing::Test {
 protected:
  Cgroup() {
    std::string name = testing::TempDir() + "fp4moe_XXXXXX";
    EXPECT_NE(::mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  ~Cgroup() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path whole = root_ + path;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << text;
  }
  // Version 2: `folder` below /sys/fs/cgroup.
  void group(const std::string& folder, const std::string& limit, int64_t used, int64_t inactive_file) const {
    const std::string prefix = "/sys/fs/cgroup" + folder + "/memory.";
    write(prefix + "max", limit + "\n");
    write(prefix + "current", std::to_string(used) + "\n");
    write(prefix + "stat",
          "anon 5\nactive_file 7\ninactive_file " + std::to_string(inactive_file) + "\nslab 1\n");
  }

  std::string root_;
};

TEST_F(Cgroup, NothingLimitsWhereThereAreNoGroups) {
  EXPECT_EQ(cgroup_available_memory(root_), kNoLimit);
  EXPECT_TRUE(std::isinf(cgroup_cores(root_)));
}

TEST_F(Cgroup, ReclaimablePagesCountAsAvailable) {
  write("/proc/self/cgroup", "0::/\n");
  group("", "1000", 900, 0);
  EXPECT_EQ(cgroup_available_memory(root_), 100);
  group("", "1000", 900, 600);
  EXPECT_EQ(cgroup_available_memory(root_), 700);
  group("", "1000", 1200, 0);  // the limit was lowered
  EXPECT_EQ(cgroup_available_memory(root_), 0);
  group("", "max", 900, 600);
  EXPECT_EQ(cgroup_available_memory(root_), kNoLimit);
}

TEST_F(Cgroup, TheSmallestLimitUpToTheTopCounts) {
  write("/proc/self/cgroup", "0::/system.slice/fp4moe.service\n");
  group("/system.slice/fp4moe.service", "max", 10, 0);
  write("/sys/fs/cgroup/system.slice/fp4moe.service/cpu.max", "300000 100000\n");
  EXPECT_EQ(cgroup_available_memory(root_), kNoLimit);
  EXPECT_EQ(cgroup_cores(root_), 3);
  group("/system.slice", "500", 200, 100);
  write("/sys/fs/cgroup/system.slice/cpu.max", "150000 100000\n");
  EXPECT_EQ(cgroup_available_memory(root_), 400);
  EXPECT_EQ(cgroup_cores(root_), 1.5);
  group("/system.slice/fp4moe.service", "50", 10, 0);
  write("/sys/fs/cgroup/system.slice/cpu.max", "max 100000\n");
  EXPECT_EQ(cgroup_available_memory(root_), 40);
  EXPECT_EQ(cgroup_cores(root_), 3);
  group("/other", "1", 1, 0);  // does not contain the process
  EXPECT_EQ(cgroup_available_memory(root_), 40);
}

// Without a cgroup namespace, /proc names the group of the host, but the mount's top is the container's
// group.
TEST_F(Cgroup, APartOfTheTreeIsMounted) {
  for (const char* path : {"0::/docker/0123\n", "0::/../../job\n"}) {
    write("/proc/self/cgroup", path);
    group("", "1000", 300, 0);
    write("/sys/fs/cgroup/cpu.max", "200000 100000\n");
    EXPECT_EQ(cgroup_available_memory(root_), 700) << path;
    EXPECT_EQ(cgroup_cores(root_), 2) << path;
  }
}

TEST_F(Cgroup, VersionOne) {
  write("/proc/self/cgroup",
        "9:name=systemd:/\n4:memory:/docker/1\n3:cpuset:/docker/1\n2:cpu,cpuacct:/docker/1\n0::/docker/1\n");
  const std::string memory = "/sys/fs/cgroup/memory", cpu = "/sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_";
  write(memory + "/memory.limit_in_bytes", "9223372036854771712\n");
  write(memory + "/memory.usage_in_bytes", "123456\n");
  write(memory + "/docker/1/memory.limit_in_bytes", "1000\n");
  write(memory + "/docker/1/memory.usage_in_bytes", "900\n");
  write(memory + "/docker/1/memory.stat", "cache 500\ninactive_file 1\ntotal_inactive_file 300\n");
  write(cpu + "quota_us", "-1\n");
  write(cpu + "period_us", "100000\n");
  EXPECT_EQ(cgroup_available_memory(root_), 400);
  EXPECT_TRUE(std::isinf(cgroup_cores(root_)));
  write(cpu + "quota_us", "250000\n");
  EXPECT_EQ(cgroup_cores(root_), 2.5);
}

}  // namespace
}  // namespace fp4moe
