// Lists the tensors of a make_tiny checkpoint and generates their data.
#pragma once

#include <cstdint>
#include <vector>

#include "io/checkpoint/safetensors.h"
#include "io/config/model_config.h"

namespace fp4moe {

// A tensor's distribution, chosen so that activations keep roughly the same magnitude from layer to layer.
enum class TinyContent {
  kNormal,    // `level` * approximately N(0, 1)
  kNearOne,   // 1 + `level` * approximately N(0, 1)
  kLevel,     // `level` * (1 +- 1/8)
  kCodes,     // e2m1 codes, uniformly distributed
  kE8m0,      // 2^-8 to 2^-5: weights with a standard deviation of about 0.05
  kE4m3,      // 128 to 240: with the tensor scale, weights with a standard deviation of about 0.02
  kFp8Codes,  // +-1 to +-1.875 in e4m3
};

struct TinyTensor {
  TensorSpec spec;
  TinyContent content = TinyContent::kNormal;
  float level = 1;
};

// Returns all tensors of the model in layer order, with the dialect's names. The layers for multi-token
// prediction that the config declares are included, without copies of the embedding and the LM head.
std::vector<TinyTensor> list_tiny_tensors(const ModelConfig& config);
// Pushes the tensor's data, which depends only on `tensor` and `seed`.
Status fill_tiny_tensor(const TinyTensor& tensor, uint64_t seed, const ByteSink& sink);

}  // namespace fp4moe
