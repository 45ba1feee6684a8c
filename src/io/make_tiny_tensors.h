// The tensors of a checkpoint of make_tiny.
#pragma once

#include <cstdint>
#include <vector>

#include "io/model_config.h"
#include "io/safetensors.h"

namespace fp4moe {

// What random numbers a tensor holds, so that activations keep about their size from layer to layer.
enum class TinyContent {
  kNormal,   // `level` * about N(0, 1)
  kNearOne,  // 1 + `level` * about N(0, 1)
  kLevel,    // `level` * (1 +- 1/8)
  kCodes,    // e2m1 codes, all 16 equally often
  kE8m0,     // 2^-8 to 2^-5: with the codes a standard deviation of about 0.05
  kE4m3,     // 128 to 240: with the codes and the tensor scale one of about 0.02
};

struct TinyTensor {
  TensorSpec spec;
  TinyContent content = TinyContent::kNormal;
  float level = 1;
};

// All tensors of the model in layer order, named as its dialect names them.
std::vector<TinyTensor> list_tiny_tensors(const ModelConfig& config);
// Pushes the tensor's data; depends on nothing but its arguments.
Status fill_tiny_tensor(const TinyTensor& tensor, uint64_t seed, const ByteSink& sink);

}  // namespace fp4moe
