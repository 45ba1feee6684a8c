// The fabrics local and threads: all ranks in one address space.
#pragma once

#include "comm/job.h"

namespace fp4moe {

Result<std::unique_ptr<Job>> open_threads_job(const JobOptions& options, const Fabric& fabric);

}  // namespace fp4moe
