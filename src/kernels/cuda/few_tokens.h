// The whole MoE layer behind the router for few tokens, as one launch.
#pragma once

#include "kernels/device_moe.h"

namespace fp4moe {

// Whether few_tokens_layer() can do it: few tokens and pairs, H and I of which everything fits into shared
// memory. Looks at sizes alone.
bool few_tokens_fits(const DeviceMoeArgs& args);
// Of the workspace.
int64_t few_tokens_workspace_bytes(const TiledExperts& experts, int64_t topk);
// Precondition: few_tokens_fits(). On the current stream; one cooperative launch, none for T = 0.
void few_tokens_layer(const DeviceMoeArgs& args);

}  // namespace fp4moe
