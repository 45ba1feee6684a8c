#include "inspect/doctor_checks.h"

#include <fmt/format.h>

#include "engine/startup/memory_plan.h"

namespace fp4moe {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;
constexpr int64_t kLeastMemory = 2 * kGiB, kLeastCache = 4 * kGiB, kLeastFiles = 4096;

Check ok(std::string name, std::string detail) {
  return {CheckLevel::kOk, std::move(name), std::move(detail), {}};
}
Check warn(std::string name, std::string detail, std::string fix) {
  return {CheckLevel::kWarn, std::move(name), std::move(detail), std::move(fix)};
}
Check fail(std::string name, std::string detail, std::string fix) {
  return {CheckLevel::kFail, std::move(name), std::move(detail), std::move(fix)};
}

Check judge_cpu(const MachineFacts& f) {
  const std::string detail = fmt::format("{}, {} of {} cores, kernels for {}", f.cpu, f.usable_cores,
                                         f.online_cores, isa_name(f.isa));
  if (f.isa == Isa::kScalar)
    return warn("cpu", detail,
                "use a CPU with AVX2, which is many times faster; unset FP4MOE_ISA if it is set");
  return ok("cpu", detail);
}

Check judge_cores(const MachineFacts& f) {
  const std::string detail = fmt::format("{} of {} cores are usable", f.usable_cores, f.online_cores);
  if (f.usable_cores < f.online_cores)
    return warn("cores", detail,
                "check the affinity mask and the cgroup quota: taskset, docker --cpus, systemd CPUQuota=");
  return ok("cores", detail);
}

Check judge_numa(const MachineFacts& f) {
  if (f.numa_nodes <= 1) return ok("numa", "one node");
  const std::string detail = fmt::format("{} nodes", f.numa_nodes);
  if (f.balances_numa)
    return warn(
        "numa", detail + "; the kernel moves pages between them",
        "sysctl kernel.numa_balancing=0, and run one server per node: numactl --cpunodebind=N --membind=N");
  return warn(
      "numa", detail,
      "run one server per node, which is faster: numactl --cpunodebind=N --membind=N fp4moe serve ...");
}

Check judge_governor(const MachineFacts& f) {
  if (f.governor.empty()) return ok("frequency", "not reported by the system");
  if (f.governor == "performance" || f.governor == "schedutil") return ok("frequency", f.governor);
  return warn("frequency", f.governor, "cpupower frequency-set -g performance");
}

Check judge_huge_pages(const MachineFacts& f) {
  if (f.huge_pages == "never")
    return warn("huge_pages", "never: weights are stored in 4 KiB pages",
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
  return ok("huge_pages", f.huge_pages.empty() ? "not reported by the system" : f.huge_pages);
}

Check judge_memory(const MachineFacts& f) {
  const std::string detail =
      fmt::format("{} of {} available", size_string(f.available_bytes), size_string(f.memory_bytes));
  if (f.available_bytes < kLeastMemory)
    return warn(
        "memory", detail,
        "free some memory; the demo needs less than 1 GiB, and `fp4moe plan MODEL` shows a model's needs");
  return ok("memory", detail);
}

Check judge_memlock(const MachineFacts& f) {
  if (f.memlock_bytes < 0) return ok("memlock", "no limit");
  const std::string detail = size_string(f.memlock_bytes);
  if (f.memlock_bytes < f.memory_bytes / 2)
    return warn("memlock", detail + ": the system may evict mapped weights while the server is idle",
                "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit");
  return ok("memlock", detail);
}

Check judge_files(const MachineFacts& f) {
  if (f.open_files < 0) return ok("open_files", "no limit");
  const std::string detail = fmt::format("{}", f.open_files);
  if (f.open_files < kLeastFiles)
    return warn("open_files", detail + ": the server can accept slightly fewer clients than this",
                "ulimit -n 65536, or LimitNOFILE=65536 in the unit");
  return ok("open_files", detail);
}

Check judge_cache(const MachineFacts& f) {
  if (f.cache_folder.empty())
    return warn("cache", "no folder, because XDG_CACHE_HOME and HOME are not set",
                "set --weight-cache-dir and --autotune-cache; otherwise every start packs and tunes again");
  if (!f.cache_error.empty())
    return warn("cache", f.cache_folder + ": " + f.cache_error,
                "set --weight-cache-dir and --autotune-cache to other places; otherwise every start packs "
                "and tunes again");
  const std::string detail = f.cache_folder + ", " + size_string(f.cache_free_bytes) + " free";
  if (f.cache_free_bytes < kLeastCache)
    return warn("cache", detail,
                "set --weight-cache-dir to another disk; packed weights are as large as the checkpoint");
  return ok("cache", detail);
}

Check judge_gpu(const MachineFacts& f) {
  if (!f.gpu.empty()) return ok("gpu", f.gpu);
  if (f.has_gpu_file)
    return fail("gpu", "present but unusable: " + f.gpu_error, "resolve this error, or use --device cpu");
  return ok("gpu", "none: " + f.gpu_error);
}

// The libraries are needed only with a GPU.
Check judge_library(const MachineFacts& f, const LibraryFact& library) {
  if (library.error.empty()) return ok(library.name, library.path);
  if (f.gpu.empty()) return ok(library.name, "not needed without a GPU");
  return fail(library.name, library.error, "scripts/setup --cuda, or FP4MOE_CUDA_LIBS=FOLDER");
}

Check judge_mpi(const MachineFacts& f) {
  if (!f.mpirun.empty()) return ok("mpi", f.mpirun);
  return ok("mpi", "mpirun not found; several ranks run as threads of one process");
}

Check judge_port(const MachineFacts& f) {
  if (f.port_error.empty()) return ok("port", fmt::format("{} is free", f.port));
  return fail("port", fmt::format("{}: {}", f.port, f.port_error), "fp4moe serve MODEL --port OTHER");
}

}  // namespace

const char* level_name(CheckLevel level) {
  switch (level) {
    case CheckLevel::kOk:
      return "ok";
    case CheckLevel::kWarn:
      return "warn";
    case CheckLevel::kFail:
      return "fail";
  }
  return "unknown";
}

std::vector<Check> judge(const MachineFacts& f) {
  std::vector<Check> checks = {judge_cpu(f),    judge_cores(f),      judge_numa(f),    judge_governor(f),
                               judge_memory(f), judge_huge_pages(f), judge_memlock(f), judge_files(f),
                               judge_cache(f),  judge_port(f),       judge_mpi(f),     judge_gpu(f)};
  for (const LibraryFact& library : f.libraries) checks.push_back(judge_library(f, library));
  return checks;
}

}  // namespace fp4moe
