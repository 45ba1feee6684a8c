// Layouts of ranks in which the tests run draft models.
#pragma once

#include <string>

#include "fp4moe/config.h"

namespace fp4moe {

struct DraftLayout {
  int tp = 1, ep = 1, dp = 1;
  const char* a2a = "none";
  std::string text() const {
    return "tp " + std::to_string(tp) + " ep " + std::to_string(ep) + " dp " + std::to_string(dp) + " " + a2a;
  }
};
// With one, two and four groups. One of the four has no sequences.
inline constexpr DraftLayout kDraftLayouts[] = {
    {2, 2, 1}, {4, 4, 1},           {2, 2, 2},           {2, 2, 2, "deepep"},     {2, 2, 2, "flashinfer"},
    {4, 4, 2}, {4, 4, 2, "deepep"}, {4, 4, 4, "deepep"}, {4, 4, 4, "flashinfer"},
};
inline EngineConfig flags_of(const DraftLayout& layout) {
  EngineConfig flags;
  flags.tp_size = layout.tp;
  flags.ep_size = layout.ep;
  flags.dp_size = layout.dp;
  flags.enable_dp_attention = layout.dp > 1;
  flags.moe_a2a_backend = layout.a2a;
  return flags;
}

}  // namespace fp4moe
