#include <dlfcn.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "comm/job.h"
#include "comm/mpi_endpoint.h"

namespace fp4moe {
namespace {

constexpr const char* kPluginFile = "libfp4moe_mpi.so";

// Candidate paths of the plug-in: only FP4MOE_MPI_PLUGIN if it is set, else the binary's folder (for a build)
// and the library folder (for an installation).
std::vector<std::string> plugin_paths() {
  if (const char* told = std::getenv("FP4MOE_MPI_PLUGIN")) return {told};
  char exe[4096];
  const ssize_t length = readlink("/proc/self/exe", exe, sizeof exe);
  if (length <= 0) return {kPluginFile};
  std::string folder(exe, static_cast<size_t>(length));
  folder.resize(folder.rfind('/') + 1);
  return {folder + kPluginFile, folder + "../" FP4MOE_LIBDIR "/" + kPluginFile};
}

Result<const Fp4moeMpi*> load_plugin() {
  std::string reasons;
  for (const std::string& path : plugin_paths()) {
    // RTLD_GLOBAL, because MPI's own plug-ins resolve its symbols globally.
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) {
      reasons += std::string(reasons.empty() ? "" : "; ") + dlerror();
      continue;
    }
    const auto entry = reinterpret_cast<const Fp4moeMpi* (*)()>(dlsym(library, "fp4moe_mpi"));
    const Fp4moeMpi* mpi = entry == nullptr ? nullptr : entry();
    if (mpi != nullptr && mpi->abi == FP4MOE_MPI_ABI) return mpi;
    return unsupported("fabric=mpi: " + path + " is not the plug-in of this version (interface " +
                       (mpi == nullptr ? "missing" : std::to_string(mpi->abi)) + ", expected " +
                       std::to_string(FP4MOE_MPI_ABI) + ")");
  }
  return unsupported("fabric=mpi needs the MPI plug-in, which is built where MPI is installed: " + reasons +
                     "; nearest legal choice: one process with --fabric threads");
}

class MpiJob : public Job {
 public:
  MpiJob(const Fabric& fabric, const Hello& hello, std::shared_ptr<RankMemory> memory,
         std::shared_ptr<MpiLink> link)
      : fabric_(fabric), hello_(hello), memory_(std::move(memory)), link_(std::move(link)) {
    for (int i = 0; i < num_local_ranks(); ++i)
      endpoints_.push_back(std::make_unique<MpiEndpoint>(*memory_, *link_, first_rank() + i));
  }
  ~MpiJob() override { link_->stop(); }

  const Fabric& fabric() const override { return fabric_; }
  int num_processes() const override { return hello_.num_processes; }
  int process() const override { return hello_.process; }
  int first_rank() const override { return memory_->shape().first_rank; }
  int num_local_ranks() const override { return memory_->shape().num_local_ranks; }
  std::string data() const override { return link_->data(); }
  Endpoint& endpoint(int rank) override {
    FP4MOE_CHECK(memory_->is_local(rank), "rank " + std::to_string(rank));
    return *endpoints_[static_cast<size_t>(rank - first_rank())];
  }
  void abort(const Status& status) override {
    if (!has_aborted_.exchange(true)) log_error("the job ends: " + status.message());
    link_->fail(status);
    link_->abort();
  }

 private:
  const Fabric fabric_;
  std::atomic<bool> has_aborted_{false};
  const Hello hello_;
  std::shared_ptr<RankMemory> memory_;
  std::shared_ptr<MpiLink> link_;
  std::vector<std::unique_ptr<MpiEndpoint>> endpoints_;
};

std::chrono::nanoseconds seconds(double s) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(s));
}

// By default mpirun binds each process to one core, which all its ranks' threads would share.
void warn_if_bound(int num_local_ranks) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  const int cores = CPU_COUNT(&allowed);
  if (cores < num_local_ranks && cores < sysconf(_SC_NPROCESSORS_ONLN))
    log_warning("this process may use " + std::to_string(cores) + " of " +
                std::to_string(sysconf(_SC_NPROCESSORS_ONLN)) + " cores for " +
                std::to_string(num_local_ranks) + " ranks; start it with mpirun --bind-to none");
}

}  // namespace

Result<std::unique_ptr<Job>> open_mpi_job(const JobOptions& options, const Fabric& fabric) {
  const LauncherInfo launcher = launcher_info();
  for (const std::string* text : {&options.config_text, &options.data})
    if (static_cast<int64_t>(text->size()) > kMaxHelloText)
      return invalid_argument("a text of " + std::to_string(text->size()) +
                              " bytes is too long for a job's start; the limit is " +
                              std::to_string(kMaxHelloText));
  FP4MOE_ASSIGN_OR_RETURN(const Fp4moeMpi* mpi, load_plugin());
  FP4MOE_ASSIGN_OR_RETURN(std::unique_ptr<RankMemory> made,
                          RankMemory::make({.num_ranks = fabric.num_ranks,
                                            .first_rank = fabric.rank,
                                            .num_local_ranks = fabric.num_ranks / launcher.num_processes,
                                            .heap_bytes = options.heap_bytes,
                                            .first_signal = options.first_signal}));
  const std::shared_ptr<RankMemory> memory = std::move(made);
  const Hello hello = {.process = launcher.process,
                       .num_processes = launcher.num_processes,
                       .num_ranks = fabric.num_ranks,
                       .first_signal = options.first_signal,
                       .heap_bytes = options.heap_bytes,
                       .pid_space = pid_space_id(),
                       .pid = getpid(),
                       .version = FP4MOE_VERSION,
                       .config = options.config_text,
                       .data = options.data};
  warn_if_bound(memory->shape().num_local_ranks);
  const auto link = std::make_shared<MpiLink>(*mpi, memory, hello, seconds(options.timeout_seconds));
  if (const Status status = MpiLink::start(link, seconds(options.start_timeout_seconds)); !status.ok()) {
    link->stop();
    return status;
  }
  return std::unique_ptr<Job>(std::make_unique<MpiJob>(fabric, hello, memory, link));
}

}  // namespace fp4moe
