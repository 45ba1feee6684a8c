// The whole MoE layer after the router for few tokens, as one launch.
#pragma once

#include "kernels/device_moe.h"

namespace fp4moe {

enum class FewWeights : uint8_t {
  kBf16,  // tiles of w4a16 (tile_layout.h)
  kFp8,   // tiles of w4a8 (fp8_tile_layout.h)
};

// Whether few_tokens_layer() supports args: few tokens and pairs, and H and I for which everything fits into
// shared memory. Depends only on the current GPU and on sizes.
bool few_tokens_fits(const DeviceMoeArgs& args, FewWeights weights = FewWeights::kBf16);
// Bytes of DeviceMoeArgs::workspace.
int64_t few_tokens_workspace_bytes(const TiledExperts& experts, int64_t topk);
// Precondition: few_tokens_fits(). On the current stream; one cooperative launch, none for T = 0.
void few_tokens_layer(const DeviceMoeArgs& args, FewWeights weights = FewWeights::kBf16);

}  // namespace fp4moe
