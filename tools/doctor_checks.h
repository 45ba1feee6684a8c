// What fp4moe wants to know of a machine, and what it makes of that: facts are gathered in one place and
// judged in another, so that every judgement can be tested anywhere.
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
  std::string detail;  // what was found
  std::string fix;     // a command or a sentence; empty where there is nothing to do
};

struct LibraryFact {
  std::string name, path;  // path: where it was found
  std::string error;       // or why not
};

struct MachineFacts {
  std::string cpu;
  Isa isa = Isa::kScalar;
  int online_cores = 1, usable_cores = 1, numa_nodes = 1;
  bool balances_numa = false;  // the kernel moves pages between nodes by itself
  std::string governor;        // of cpu0's frequency; empty: the system does not say
  std::string huge_pages;      // transparent ones: always, madvise or never; empty: unknown
  int64_t memory_bytes = 0, available_bytes = 0;
  int64_t memlock_bytes = 0, open_files = 0;  // limits of this process; -1: none
  std::string cache_folder;                   // of packed weights and tactics; empty: none
  std::string cache_error;                    // why nothing can be written there
  int64_t cache_free_bytes = 0;
  bool has_gpu_file = false;  // /dev/nvidia0
  std::string gpu;            // name, memory, driver; empty: none can be used
  std::string gpu_error;      // then why
  std::vector<LibraryFact> libraries;
  std::string mpirun;  // path; empty: none
  int port = 0;
  std::string port_error;  // why it cannot be listened on
};

MachineFacts gather_facts(int port);
std::vector<Check> judge(const MachineFacts& facts);

// Whether the model could be served here, without reading a weight but for the speed of its disk.
std::vector<Check> check_model(const std::string& model_path);

const char* level_name(CheckLevel level);  // "ok", "warn", "fail"

}  // namespace fp4moe
