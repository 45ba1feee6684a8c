// Rewrites a bf16 checkpoint in a published dialect, with its MLP and expert projections in FP4, one tensor
// at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "formats/weight_quantize.h"
#include "io/checkpoint/checkpoint.h"
#include "io/config/model_config.h"

namespace fp4moe {

struct QuantizeOptions {
  Fp4Format format = Fp4Format::kMxfp4;  // kMxfp4 or kNvfp4
  // auto | gpt-oss (MXFP4) | modelopt (NVFP4) | compressed-tensors (either). auto: gpt-oss for that family,
  // otherwise modelopt for NVFP4 and compressed-tensors for MXFP4.
  std::string dialect = "auto";
  ScaleSearch search = ScaleSearch::kAbsmax;
  // Patterns (quant_config.h) of modules that stay bf16, as attention, router, embedding and head always do.
  std::vector<std::string> exclude;
  int num_shards = 1;
  // Returns the largest |x| (above 0) that reaches a module such as "model.layers.3.mlp.experts.0.down_proj".
  // Null: unknown; the checkpoint then declares its activations as not quantised. NVFP4 only.
  std::function<float(const std::string& module)> input_amax;
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;  // in source bytes; may be null
};

// The quantisation error of a set of weights.
struct WeightError {
  double error = 0, energy = 0;  // sums of squares of the differences and of the weights

  double relative_l2() const;
};

// The error of one projection of one layer, summed over the experts.
struct ProjectionError {
  int64_t layer = 0;
  std::string projection;  // "experts.gate_up_proj", "shared_experts.down_proj", "down_proj"
  WeightError weights;
};

struct QuantizeResult {
  std::string dialect;                  // never "auto"
  std::vector<ProjectionError> errors;  // in layer order
  int64_t num_modules = 0, source_bytes = 0, written_bytes = 0;
};

// Checks the job before any weight is read; returns the dialect. kUnsupported (a checkpoint that is already
// quantised, a format or dialect that the family does not have, a pattern that matches a routed expert),
// kInvalidArgument.
Result<std::string> check_quantize(const ModelConfig& config, const QuantizeOptions& options);

// Quantises every gate, up and down projection below a layer's mlp into `folder`, which must be absent or
// empty; copies the other tensors and files; writes config.json last. The gate and up
// projections of an expert share NVFP4's tensor scale, as engines that fuse them require. Memory use: one
// projection. kDataLoss names the tensor and the position of a weight that is not finite; kDoesNotFit: the
// disk is too small.
Result<QuantizeResult> quantize_checkpoint(const Checkpoint& source, const ModelConfig& config,
                                           const std::string& folder, const QuantizeOptions& options,
                                           ThreadPool& pool);

}  // namespace fp4moe
