// Job: the ranks of a model and the fabric between them, as seen by this process.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "comm/endpoint.h"
#include "comm/fabric.h"

namespace fp4moe {

struct JobOptions {
  std::string fabric = "auto";        // auto | local | threads | mpi
  int num_ranks = 1;                  // R
  int64_t heap_bytes = 0;             // size of each rank's symmetric heap
  double timeout_seconds = 10;        // for a blocked send, and for an orderly shutdown
  double start_timeout_seconds = 60;  // for all processes to start
  std::string config_text;            // must be the same text in all processes; compared at start
  std::string data;                   // process 0's is sent to all processes at start (Job::data())
  // Initial value of signal cells: the communicators' first_epoch - 1. Tests start near 2^32.
  uint32_t first_signal = 0;
};

// R ranks in P processes, with R / P consecutive ranks in each; R % P == 0. P is 1 with the local and threads
// fabrics.
class Job {
 public:
  // Starts the fabric and waits for all processes. kUnsupported: the fabric is not available, or cannot run
  // these ranks in these processes. kDoesNotFit: no memory for the heaps. kDeadline: some ranks, which the
  // message names, did not start in time. kInvalidArgument: an option is out of range, or two processes,
  // which the message names, have different configurations.
  static Result<std::unique_ptr<Job>> open(const JobOptions& options);
  virtual ~Job() = default;

  virtual const Fabric& fabric() const = 0;
  virtual int num_processes() const = 0;
  virtual int process() const = 0;
  virtual int first_rank() const = 0;       // of this process
  virtual int num_local_ranks() const = 0;  // R / P
  virtual std::string data() const = 0;     // JobOptions::data of process 0
  // Precondition: rank in [first_rank, first_rank + num_local_ranks).
  virtual Endpoint& endpoint(int rank) = 0;
  // Logs `status` and ends all processes of the job at once (mpi: MPI_Abort; otherwise: fails the endpoints).
  virtual void abort(const Status& status) = 0;
};

// Whether this process was started by mpirun or srun, and its number. The values come from the launcher's
// environment variables, because they are needed before the MPI plug-in is loaded.
struct LauncherInfo {
  bool launched = false;
  int process = 0, num_processes = 1;
  int local_processes = 1;  // processes on this host; num_processes if the launcher does not set it
};
LauncherInfo launcher_info();

// Called by Job::open() for the local and threads fabrics: all ranks are in one address space.
Result<std::unique_ptr<Job>> open_threads_job(const JobOptions& options, const Fabric& fabric);
// Called by Job::open() for the mpi fabric: the ranks are in several processes, on one or more machines.
// kUnsupported if the plug-in cannot be loaded; other errors are those of Job::open().
Result<std::unique_ptr<Job>> open_mpi_job(const JobOptions& options, const Fabric& fabric);

}  // namespace fp4moe
