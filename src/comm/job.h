// Job: the ranks of a model and the fabric between them, as this process sees them.
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
  int64_t heap_bytes = 0;             // symmetric heap of each rank
  double timeout_seconds = 10;        // of a blocked send and of an orderly end
  double start_timeout_seconds = 60;  // for all processes to come
  std::string config_text;            // what all processes must agree on: compared by content hash at start
  // What signal cells hold at first: the communicators' first_epoch - 1. Tests start near 2^32.
  uint32_t first_signal = 0;
};

// R ranks in P processes, R / P consecutive ones in each; R % P == 0. With local and threads P = 1.
class Job {
 public:
  // Starts the fabric and waits for all processes. kUnsupported: a fabric or split that cannot be;
  // kDoesNotFit: no memory for the heaps; kDeadlineExceeded names the ranks that did not come;
  // kFailedPrecondition (kInvalidArgument where the code has none) names both configurations where they
  // differ.
  static Result<std::unique_ptr<Job>> open(const JobOptions& options);
  virtual ~Job() = default;

  virtual const Fabric& fabric() const = 0;
  virtual int num_processes() const = 0;
  virtual int process() const = 0;
  virtual int first_rank() const = 0;       // of this process
  virtual int num_local_ranks() const = 0;  // R / P
  // rank in [first_rank, first_rank + num_local_ranks).
  virtual Endpoint& endpoint(int rank) = 0;
  // Ends all processes of the job now, with this line in the log (mpi: MPI_Abort; else: fails the endpoints).
  virtual void abort(const Status& status) = 0;
};

// Whether this process was started by mpirun or srun, and its place: from the launcher's environment, so that
// it is known before the MPI plug-in is loaded.
struct LauncherInfo {
  bool launched = false;
  int process = 0, num_processes = 1;
  int local_processes = 1;  // on this host; all of them where the launcher does not say
};
LauncherInfo launcher_info();

}  // namespace fp4moe
