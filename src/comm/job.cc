#include "comm/job.h"

#include <string>
#include <string_view>

#include "base/check.h"

namespace fp4moe {

Result<std::unique_ptr<Job>> Job::open(const JobOptions& options) {
  if (options.heap_bytes < 0)
    return invalid_argument("heap_bytes=" + std::to_string(options.heap_bytes) + " must be at least 0");
  // A year in nanoseconds is far from overflow.
  constexpr double kYear = 365.0 * 24 * 3600;
  for (const double s : {options.timeout_seconds, options.start_timeout_seconds})
    if (!(s > 0 && s <= kYear))
      return invalid_argument("comm_timeout=" + std::to_string(s) + " must be above 0 and at most a year");
  FP4MOE_ASSIGN_OR_RETURN(const Fabric fabric, make_fabric(options.fabric, options.num_ranks));
  if (fabric.name == std::string_view("mpi")) return open_mpi_job(options, fabric);
  return open_threads_job(options, fabric);
}

}  // namespace fp4moe
