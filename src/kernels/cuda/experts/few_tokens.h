// Runs the whole MoE layer after the router for few tokens, as one launch.
#pragma once

#include "kernels/device_moe.h"

namespace fp4moe {

enum class FewWeights : uint8_t {
  kBf16,  // tiles of w4a16 (tile_layout.h)
  kFp8,   // tiles of w4a8 (fp8_tile_layout.h)
};

// Returns whether few_tokens_layer() supports args: few tokens and pairs, no exchange, and H and I
// with which everything fits in shared memory. The result depends only on these, on `direct` and on the
// current GPU.
bool few_tokens_fits(const DeviceMoeArgs& args, FewWeights weights = FewWeights::kBf16);
// Bytes needed for DeviceMoeArgs::workspace.
int64_t few_tokens_workspace_bytes(const TiledExperts& experts, int64_t topk);
// Enqueues the layer on the current stream: one cooperative launch, none if T = 0. Precondition:
// few_tokens_fits().
void few_tokens_layer(const DeviceMoeArgs& args, FewWeights weights = FewWeights::kBf16);

}  // namespace fp4moe
