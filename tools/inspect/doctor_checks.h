// Facts about the machine, and checks of these facts. Gathering and checking are separate, so that every
// check can be tested on any machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/cpu_info.h"
#include "fp4moe/status.h"

namespace fp4moe {

enum class CheckLevel { kOk, kWarn, kFail };

struct Check {
  CheckLevel level = CheckLevel::kOk;
  std::string name;    // "cpu", "memlock"
  std::string detail;  // the result of the check
  std::string fix;     // a command or a sentence; empty if nothing needs fixing
};

struct LibraryFact {
  std::string name, path;  // path: empty if not found
  std::string error;       // why it was not found
};

// Large because every fact that a check reads is a field.
struct MachineFacts {
  std::string cpu;
  Isa isa = Isa::kScalar;
  int online_cores = 1, usable_cores = 1, numa_nodes = 1;
  bool balances_numa = false;  // automatic NUMA balancing is on
  std::string governor;        // cpu0's frequency governor; empty: unknown
  std::string huge_pages;      // transparent huge pages: always, madvise or never; empty: unknown
  int64_t memory_bytes = 0, available_bytes = 0;
  int64_t memlock_bytes = 0, open_files = 0;  // limits for this process; -1: unlimited
  std::string cache_folder;                   // for packed weights and tactics; empty: none
  std::string cache_error;                    // why the folder is not writable
  int64_t cache_free_bytes = 0;
  bool has_gpu_file = false;  // /dev/nvidia<number>
  std::string gpu;            // name, memory, driver; empty: no usable GPU
  std::string gpu_error;      // why there is no usable GPU
  std::vector<LibraryFact> libraries;
  std::string mpirun;  // path of mpirun; empty: not found
  int port = 0;
  std::string port_error;  // why the server cannot listen on the port
};

MachineFacts gather_facts(int port);
std::vector<Check> judge(const MachineFacts& facts);

// Checks whether the model can be served here. Reads no weights except to measure the disk's speed.
std::vector<Check> check_model(const std::string& model_path);

const char* level_name(CheckLevel level);  // "ok", "warn", "fail"

}  // namespace fp4moe
