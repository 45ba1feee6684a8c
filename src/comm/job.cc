#include "comm/job.h"

#include <string>

#include "base/check.h"
#include "comm/threads_job.h"

namespace fp4moe {

Result<std::unique_ptr<Job>> Job::open(const JobOptions& options) {
  if (options.heap_bytes < 0)
    return invalid_argument("heap_bytes=" + std::to_string(options.heap_bytes) + " must be at least 0");
  if (!(options.timeout_seconds > 0))
    return invalid_argument("comm_timeout=" + std::to_string(options.timeout_seconds) + " must be above 0");
  FP4MOE_ASSIGN_OR_RETURN(const Fabric fabric, make_fabric(options.fabric, options.num_ranks));
  return open_threads_job(options, fabric);
}

}  // namespace fp4moe
