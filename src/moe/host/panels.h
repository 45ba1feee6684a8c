// How one layer's experts are cut into panels; shared by packing and running.
#pragma once

#include <cstdint>

#include "moe/table.h"

namespace fp4moe {

// The panels of one of an expert's two weight matrices. A group of panels produces 16 output columns.
struct PanelGrid {
  int64_t panel_bytes = 0;
  int64_t group_panels = 1;  // 2 for gate and up
  int64_t num_groups = 0;    // output columns / 16

  int64_t group_bytes() const { return panel_bytes * group_panels; }
  int64_t expert_bytes() const { return group_bytes() * num_groups; }
};

inline PanelGrid gate_up_grid(const ExpertOps& ops, const MoeProblem& p) {
  return {ops.panel_bytes(p.format, p.hidden_size), is_gated(p.activation.kind) ? 2 : 1,
          p.local_intermediate().count / kPanelRows};
}

inline PanelGrid down_grid(const ExpertOps& ops, const MoeProblem& p) {
  return {ops.panel_bytes(p.format, p.local_intermediate().count), 1, p.hidden_size / kPanelRows};
}

}  // namespace fp4moe
