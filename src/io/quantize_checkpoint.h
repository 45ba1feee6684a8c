// Writes a bf16 checkpoint anew with FP4 experts, in a published dialect, tensor after tensor.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "formats/weight_quantize.h"
#include "io/checkpoint.h"
#include "io/model_config.h"

namespace fp4moe {

struct QuantizeOptions {
  Fp4Format format = Fp4Format::kMxfp4;  // kMxfp4 or kNvfp4
  // auto | gpt-oss (MXFP4) | modelopt (NVFP4) | compressed-tensors (either). auto: gpt-oss for that family,
  // else modelopt for NVFP4 and compressed-tensors for MXFP4.
  std::string dialect = "auto";
  ScaleSearch search = ScaleSearch::kAbsmax;
  // Patterns as quant_config.h's of modules that stay bf16, beside attention, router, embedding and head.
  std::vector<std::string> exclude;
  int num_shards = 1;
  // The largest |x| that reaches module "model.layers.3.mlp.experts.0.down_proj", above 0; null: nobody
  // knows, and the checkpoint declares its activations as not quantised. NVFP4 only.
  std::function<float(const std::string& module)> input_amax;
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;  // of the source; may be null
};

// What quantising did to some weights.
struct WeightError {
  double error = 0, energy = 0;  // sums of squares: of the differences, of the weights

  double relative_l2() const;
};

// One projection of one layer, all experts together.
struct ProjectionError {
  int64_t layer = 0;
  std::string projection;  // "experts.gate_up_proj", "shared_experts.down_proj", "down_proj"
  WeightError weights;
};

struct QuantizeResult {
  std::string dialect;                  // never auto
  std::vector<ProjectionError> errors;  // in layer order
  int64_t num_modules = 0, source_bytes = 0, written_bytes = 0;
};

// What would refuse the job, before any weight is read: kUnsupported (a checkpoint that is quantised already,
// a format or dialect that the family has not, a pattern that names a routed expert), kInvalidArgument.
Result<std::string> check_quantize(const ModelConfig& config, const QuantizeOptions& options);

// Quantises every gate, up and down projection below a layer's mlp to `folder`, which must be absent or
// empty; other tensors and the tokenizer's files are copied, config.json is written last. Gate and up of an
// expert share NVFP4's tensor scale, as engines that fuse them want. Memory: one projection. kDataLoss names
// the tensor and the position of a weight that is not finite; kDoesNotFit: the disk is too small.
Result<QuantizeResult> quantize_checkpoint(const Checkpoint& source, const ModelConfig& config,
                                           const std::string& folder, const QuantizeOptions& options,
                                           ThreadPool& pool);

}  // namespace fp4moe
