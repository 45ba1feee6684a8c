// MoePlan as text.
#include "moe/plan/plan.h"
#include "moe/table.h"

namespace fp4moe {
namespace {

// The protocol and all settings that differ from the default: "deepep, nvfp4 rows, fp8 results,
// deterministic".
std::string a2a_text(const MoePlan& plan) {
  const A2aSettings& a2a = plan.a2a_settings();
  std::string text = plan.a2a()->name;
  if (a2a.payload != Payload::kAct) text += std::string(", ") + payload_name(a2a.payload) + " rows";
  if (a2a.combine_payload != CombinePayload::kAct)
    text += std::string(", ") + combine_payload_name(a2a.combine_payload) + " results";
  if (a2a.deterministic) text += ", deterministic";
  if (a2a.checksum) text += ", checksums";
  return text;
}

std::string numerics_text(const MoePlan& plan) {
  return plan.problem().format == Fp4Format::kNone ? "bf16" : numerics_text(plan.numerics());
}

std::string range(Shard s) {
  return "[" + std::to_string(s.first) + ", " + std::to_string(s.first + s.count) + ")";
}

// A rank's part of every layer's experts, and its data-parallel group.
std::string rank_text(const MoePlan& plan, int rank) {
  const MoePlan mine = plan.at_rank(rank);
  const MoeProblem& p = mine.problem();
  return "experts " + range(p.local_experts()) + ", I " + range(p.local_intermediate()) + ", group " +
         std::to_string(p.layout.dp_rank()) + " of " + std::to_string(p.layout.dp);
}

}  // namespace

const char* runner_name(const MoePlan& plan) {
  return plan.runner() == nullptr ? "none" : plan.runner()->name;
}

namespace {

// Returns whether the row is for another device, or for unquantised experts although the experts are FP4. The
// summary omits such rows.
bool is_far_off(const std::string& runner, const MoePlan& plan) {
  const MoeProblem& p = plan.problem();
  for (const RunnerRow& row : runner_rows())
    if (runner == row.name)
      return row.device != p.device || (row.formats.has(Fp4Format::kNone) && !row.formats.has(p.format));
  return false;
}

}  // namespace

std::string summary(const MoePlan& plan) {
  if (plan.runner() == nullptr) return "nothing planned";
  const RankLayout& layout = plan.problem().layout;
  std::string text = numerics_text(plan) + " by " + plan.runner()->name + " over a2a " + a2a_text(plan) +
                     ", fabric " + plan.fabric().name;
  if (plan.problem().device == DeviceKind::kCuda && layout.tp > 1)
    text += plan.spans_processes() ? ", rows and sums over NCCL" : ", rows and sums in shared GPU memory";
  if (layout.tp > 1)
    text += ", tp=" + std::to_string(layout.tp) + " ep=" + std::to_string(layout.ep) +
            " dp=" + std::to_string(layout.dp);
  if (!plan.note().empty()) text += " (" + plan.note() + ")";
  for (const RowVerdict& v : plan.verdicts()) {
    if (v.kind != "runner" || is_far_off(v.name, plan)) continue;
    if (v.reason.empty()) return text + "; runner-up " + v.name;
    text += "; not " + v.name + ": " + v.reason;
  }
  return text;
}

std::string describe(const MoePlan& plan) {
  if (plan.runner() == nullptr) return "MoE plan: empty";
  const MoeProblem& p = plan.problem();
  std::string text = std::string("MoE plan: ") + fp4_format_name(p.format) + " " + numerics_text(plan) +
                     ", activations " + dtype_name(p.act_dtype) + ", H=" + std::to_string(p.hidden_size) +
                     " I=" + std::to_string(p.intermediate_size) + " E=" + std::to_string(p.num_experts) +
                     " K=" + std::to_string(p.top_k) + ", " + device_kind_name(p.device) + " " +
                     (p.device == DeviceKind::kCpu ? std::string(isa_name(p.isa))
                                                   : compute_capability_text(p.compute_capability)) +
                     ", fabric " + plan.fabric().name + ", " + std::to_string(p.layout.tp) +
                     (p.layout.tp == 1 ? " rank" : " ranks");
  const auto line = [&](const std::string& head, const std::string& kind, const std::string& name) {
    text += "\n  " + head + std::string(8 - head.size(), ' ') + " " + kind +
            std::string(6 - kind.size(), ' ') + " " + name;
  };
  line("chosen", "a2a", a2a_text(plan));
  line("chosen", "runner", plan.runner()->name);
  if (!plan.note().empty()) text += " (" + plan.note() + ")";
  bool has_runner_up = false;
  for (const RowVerdict& v : plan.verdicts()) {
    const bool next = v.reason.empty() && !has_runner_up;
    has_runner_up |= next;
    line(!v.reason.empty() ? "refused" : next ? "next" : "also", v.kind, v.name);
    text += v.reason.empty() ? ": fits" : ": " + v.reason;
  }
  for (int rank = 0; p.layout.tp > 1 && rank < p.layout.tp; ++rank)
    line("layout", "rank", std::to_string(rank) + ": " + rank_text(plan, rank));
  return text;
}

}  // namespace fp4moe
