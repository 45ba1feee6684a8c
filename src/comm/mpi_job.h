// The fabric mpi: ranks in several processes, on one machine or many.
#pragma once

#include "comm/job.h"

namespace fp4moe {

// kUnsupported if the plug-in cannot be loaded; other errors as Job::open().
Result<std::unique_ptr<Job>> open_mpi_job(const JobOptions& options, const Fabric& fabric);

}  // namespace fp4moe
