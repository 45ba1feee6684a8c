#include "base/cgroup.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>
#include <vector>

namespace fp4moe {
namespace {

// A folder that has the files of one controller for this process or for a group that contains it.
struct Group {
  std::string folder;
  bool is_v2 = false;
};

// Adds the folders of `path` and of all groups above it. In a container the mount may show a part of the
// tree, so that `path` does not exist; its topmost folder is the container's group then.
void add_groups(const std::string& mount, std::string path, bool is_v2, std::vector<Group>& groups) {
  if (path.find("/..") != std::string::npos) path.clear();  // outside of this cgroup namespace
  for (;;) {
    while (path.ends_with('/')) path.pop_back();
    groups.push_back({mount + path, is_v2});
    if (path.empty()) return;
    path.erase(path.find_last_of('/') + 1);
  }
}

// Reads the lines ID:CONTROLLERS:PATH of /proc/self/cgroup; CONTROLLERS is empty for version 2.
std::vector<Group> find_groups(const std::string& root, const std::string& controller) {
  const std::string mount = root + "/sys/fs/cgroup";
  std::vector<Group> groups;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string names = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    if (names.empty()) {
      add_groups(mount, path, true, groups);
      add_groups(mount + "/unified", path, true, groups);  // beside version 1
    } else if (("," + names + ",").find("," + controller + ",") != std::string::npos) {
      add_groups(mount + "/" + names, path, false, groups);
      if (names != controller) add_groups(mount + "/" + controller, path, false, groups);
    }
  }
  return groups;
}

// Returns the first integer in a file; -1 if the file is absent or starts with another text, such as "max".
int64_t read_number(const std::string& path) {
  std::ifstream file(path);
  int64_t value = -1;
  return file >> value ? value : -1;
}

// Returns the number after `key` in a file of "key number" lines; 0 if no line has the key.
int64_t read_entry(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string name;
  for (int64_t value = 0; file >> name >> value;)
    if (name == key) return value;
  return 0;
}

}  // namespace

int64_t cgroup_available_memory(const std::string& root) {
  int64_t available = std::numeric_limits<int64_t>::max();
  for (const Group& group : find_groups(root, "memory")) {
    const std::string prefix = group.folder + "/memory.";
    const int64_t limit = read_number(prefix + (group.is_v2 ? "max" : "limit_in_bytes"));
    const int64_t used = read_number(prefix + (group.is_v2 ? "current" : "usage_in_bytes"));
    if (limit < 0 || used < 0) continue;
    const int64_t cache = read_entry(prefix + "stat", group.is_v2 ? "inactive_file" : "total_inactive_file");
    available = std::min(available, std::max<int64_t>(0, limit - std::max<int64_t>(0, used - cache)));
  }
  return available;
}

double cgroup_cores(const std::string& root) {
  double cores = std::numeric_limits<double>::infinity();
  for (const Group& group : find_groups(root, "cpu")) {
    double quota = 0, period = 0;
    if (group.is_v2) {
      std::ifstream file(group.folder + "/cpu.max");
      if (!(file >> quota >> period)) continue;
    } else {
      quota = static_cast<double>(read_number(group.folder + "/cpu.cfs_quota_us"));
      period = static_cast<double>(read_number(group.folder + "/cpu.cfs_period_us"));
    }
    if (quota > 0 && period > 0) cores = std::min(cores, quota / period);
  }
  return cores;
}

}  // namespace fp4moe
