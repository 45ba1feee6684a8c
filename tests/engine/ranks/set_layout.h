// Gives a configuration the ranks of a test's layout, on GPUs.
#pragma once

#include "fp4moe/config.h"

namespace fp4moe {

// Layout has tp, ep, dp and a2a.
template <class Layout>
void set_layout(EngineConfig& config, const Layout& layout) {
  config.device = "cuda";
  config.tp_size = layout.tp;
  config.ep_size = layout.ep;
  config.dp_size = layout.dp;
  config.enable_dp_attention = layout.dp > 1;
  config.moe_a2a_backend = layout.a2a;
}

}  // namespace fp4moe
