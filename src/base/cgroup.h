// Limits that Linux control groups (containers, systemd units) set for this process.
#pragma once

#include <cstdint>
#include <string>

namespace fp4moe {

// In both functions `root` is put before /proc and /sys: "" for this machine. Each group from the process's
// own up to the topmost one counts (/proc/self/cgroup), in version 2 and version 1.

// Bytes that the process can still allocate: the smallest difference between a group's limit and its usage,
// in which page cache that is reclaimed first (inactive_file) does not count. INT64_MAX: no limit.
int64_t cgroup_available_memory(const std::string& root = "");
// The smallest CPU quota in cores. Infinity: no quota.
double cgroup_cores(const std::string& root = "");

}  // namespace fp4moe
