#include "bench/moe_kernels.h"

#include "base/check.h"
#include "kernels/cuda/layout/fp8_tile_layout.h"
#include "kernels/cuda/layout/tile_layout.h"
#include "kernels/device_moe_fp8.h"
#include "kernels/device_peak.h"

namespace fp4moe {
namespace {

void fill_tile_matrices(Fp4Format format, uint8_t* weights, int64_t n, int64_t k, int64_t num_matrices,
                        uint64_t seed) {
  sm90_peak_ops()->fill_tiles(format, weights, num_matrices * num_tiles(n) * num_tiles(k), seed);
}

void fill_fp8_matrices(Fp4Format format, uint8_t* weights, int64_t n, int64_t k, int64_t num_matrices,
                       uint64_t seed) {
  sm90_peak_ops()->fill_fp8_tiles({format, weights, n, k, num_matrices, seed});
}

bool any_sizes(const DeviceMoeArgs&) { return true; }

// The engine's choice for a layer if no tactics were timed.
template <const DeviceMoeOps* (*kOps)()>
constexpr DeviceMoeTactic kAuto = {.name = "auto",
                                   .fits = any_sizes,
                                   .layer = [](const DeviceMoeArgs& a) { run_layer(*kOps(), a); },
                                   .workspace_bytes =
                                       [](const TiledExperts& experts, int64_t max_tokens, int64_t topk) {
                                         return layer_workspace_bytes(*kOps(), experts, max_tokens, topk);
                                       }};

Result<DeviceMoeTactic> tactic_of(const DeviceMoeOps& ops, const DeviceMoeTactic& rule,
                                  const std::string& name) {
  std::string names = rule.name;
  if (name == rule.name) return rule;
  for (const DeviceMoeTactic& tactic : ops.tactics) {
    if (name == tactic.name) return tactic;
    names += std::string(", ") + tactic.name;
  }
  return invalid_argument("unknown tactic '" + name + "'; use one of: " + names);
}

}  // namespace

Result<MoeKernels> moe_kernels_of(const std::string& scheme, const std::string& tactic) {
  const DeviceMoeOps* ops = scheme == "w4a8" ? sm90_fp8_moe_ops() : sm90_moe_ops();
  if (ops == nullptr || sm90_peak_ops() == nullptr)
    return unsupported("this build has no MoE kernels for Hopper; configure it with -DFP4MOE_CUDA=ON");
  if (scheme == "w4a16") {
    FP4MOE_ASSIGN_OR_RETURN(const DeviceMoeTactic chosen, tactic_of(*ops, kAuto<sm90_moe_ops>, tactic));
    return MoeKernels{"w4a16", ops->name, tiled_bytes, fill_tile_matrices, chosen};
  }
  if (scheme == "w4a8") {
    FP4MOE_ASSIGN_OR_RETURN(const DeviceMoeTactic chosen, tactic_of(*ops, kAuto<sm90_fp8_moe_ops>, tactic));
    return MoeKernels{"w4a8", ops->name, fp8_tiled_bytes, fill_fp8_matrices, chosen};
  }
  return unsupported("bench moe does not measure --fp4-compute " + scheme + "; use w4a16 or w4a8");
}

}  // namespace fp4moe
