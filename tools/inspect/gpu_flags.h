// --gpu and --gpu-memory: plan for GPUs that this machine does not need to have.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <string>

#include "device/absent_gpu.h"

namespace fp4moe {

struct GpuFlags {
  std::string gpu;
  double gpu_memory = 0;  // in GiB

  // Returns nullopt without --gpu.
  Result<std::optional<AbsentGpu>> absent() const {
    if (gpu.empty()) return std::optional<AbsentGpu>();
    Result<AbsentGpu> found = absent_gpu(gpu, gpu_memory);
    if (!found.ok()) return found.status();
    return std::optional<AbsentGpu>(*found);
  }
};

inline void add_gpu_flags(CLI::App& subcommand, GpuFlags& flags) {
  CLI::Option* gpu = subcommand.add_option(
      "--gpu", flags.gpu,
      "plan for one GPU of this type per rank instead of this machine's GPUs: " + absent_gpu_names() +
          ", or sm_90 with --gpu-memory");
  subcommand.add_option("--gpu-memory", flags.gpu_memory, "memory of the --gpu GPU in GiB")->needs(gpu);
}

}  // namespace fp4moe
