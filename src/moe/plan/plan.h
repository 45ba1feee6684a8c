// The plan for a model's MoE layers: which table rows run them, and why. It is made before any weight is
// read.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/cpu_info.h"
#include "base/dtype.h"
#include "comm/fabric.h"
#include "device/device.h"
#include "formats/fp4_matrix.h"
#include "fp4moe/status.h"
#include "kernels/expert_ops.h"
#include "moe/placement/expert_placement.h"
#include "moe/plan/payload.h"
#include "moe/plan/rank_layout.h"
#include "moe/plan/scheme.h"
#include "moe/plan/tactics.h"

namespace fp4moe {

// Properties of the checkpoint, the activations and the machine.
struct MoeProblem {
  int64_t hidden_size = 0;        // H
  int64_t intermediate_size = 0;  // I, of one expert
  int64_t num_experts = 0;        // E
  int64_t top_k = 0;              // K
  Fp4Format format = Fp4Format::kMxfp4;
  Activation activation;
  DType act_dtype = DType::kBF16;  // kBF16 or kF32
  DeviceKind device = DeviceKind::kCpu;
  Isa isa = best_isa();        // the best level that this CPU supports
  int compute_capability = 0;  // GPU: 10 major + minor; CPU: 0
  RankLayout layout;           // this rank; the sizes above are the whole model's
  int64_t num_redundant = 0;   // further physical experts (moe/placement)

  int gpu() const { return gpu_of_rank(layout.rank); }  // ordinal of this rank's GPU

  // Number of adjacent columns of I that sharding does not split: 64, the unit of GPU tiles, or 32, the rows
  // of gate in a tile, if I has enough such blocks for all shards, else one scale block. The same on every
  // device.
  int64_t shard_block() const {
    for (const int64_t columns : {64, 32})
      if (intermediate_size % columns == 0 && intermediate_size / columns >= layout.moe_tp()) return columns;
    return fp4_block(format);
  }
  int64_t num_physical() const { return num_experts + num_redundant; }
  PlacementShape placement_shape() const { return {num_experts, num_physical(), layout.ep}; }
  // This rank's physical experts, and its part of each expert's I.
  Shard local_experts() const { return shard_blocks(num_physical(), 1, layout.ep, layout.ep_rank()); }
  Shard local_intermediate() const {
    return shard_blocks(intermediate_size, shard_block(), layout.moe_tp(), layout.moe_tp_rank());
  }
};

// The user's flags, unchecked.
struct MoeChoice {
  std::string runner = "auto";       // --moe-runner-backend: a row's name, one of SGLang's names, or auto
  std::string a2a = "none";          // --moe-a2a-backend
  std::string fp4_compute = "auto";  // auto | w4a16 | w4a4 | w4a8
  std::string act_scales = "auto";   // w4a4: auto | static | per_token
  std::string dense_quant = "none";  // none | q8 | fp8
  std::string fabric = "auto";       // auto | local | threads | mpi
  int tp = 1, ep = 1, dp = 1;
  int64_t num_redundant = 0;    // MoeProblem::num_redundant
  bool places_experts = false;  // a placement is given or made from loads
  bool enable_dp_attention = false;
  std::string deepep_mode = "auto";         // auto | low_latency
  std::string deepep_payload = "auto";      // auto (= bf16) | bf16 | fp8 | nvfp4
  std::string flashinfer_payload = "auto";  // auto | bf16 | nvfp4
  std::string flashinfer_combine = "auto";  // auto (= bf16) | bf16 | fp8
  bool disable_fp4_allgather = false;       // a2a none with DP attention: send rows unquantised
  bool deterministic = false;
  bool a2a_checksum = false;
  int64_t a2a_memory_budget = int64_t{64} << 20;  // bytes per rank
};

struct A2aRow;
struct DeviceMoeOps;
struct RunnerRow;

// A row that was not chosen.
struct RowVerdict {
  std::string kind;  // "a2a" or "runner"
  std::string name;
  std::string reason;  // why it does not fit; empty: it fits, but a better row was chosen
};

// Immutable; made by plan_moe() only. A default-constructed plan is empty and runs nothing.
class MoePlan {
 public:
  const MoeProblem& problem() const { return problem_; }
  Scheme scheme() const { return numerics_.scheme; }
  const Numerics& numerics() const { return numerics_; }
  const Fabric& fabric() const { return fabric_; }
  // Whether the ranks may be in several processes.
  bool spans_processes() const { return fabric_.name == std::string_view("mpi"); }
  // The chosen rows (moe/table.h), of static lifetime; null in an empty plan.
  const A2aRow* a2a() const { return a2a_; }
  const RunnerRow* runner() const { return runner_; }
  // The GPU runner's ops for the plan's scheme. Precondition: the plan is for a GPU, in a build with CUDA.
  const DeviceMoeOps& device_ops() const;
  const A2aSettings& a2a_settings() const { return a2a_settings_; }
  // Whether the layers' experts have a placement (MoeLayer::placed_experts()).
  bool places_experts() const { return places_experts_; }
  // Every row of the table that was not chosen, best first.
  const std::vector<RowVerdict>& verdicts() const { return verdicts_; }
  // How the user's choice was resolved (an SGLang name, ep raised to tp); empty if it was used unchanged.
  const std::string& note() const { return note_; }
  // The same plan for another rank of the job.
  MoePlan at_rank(int rank) const;
  // The same plan with other tactics; results are bit-identical.
  MoePlan with_tactics(const Tactics& tactics) const;
  const Tactics& tactics() const { return tactics_; }
  // The same plan with other tactics for a GPU's routed experts. These tactics differ in the last bits of
  // sums.
  MoePlan with_tactics(const DeviceTactics& tactics) const;
  const DeviceTactics& device_tactics() const { return device_tactics_; }
  // Whether the shared expert is sharded over all ranks, because each rank's layer output is a partial sum.
  // Otherwise each rank has the whole shared expert and runs it for its own rows.
  bool shared_expert_is_sharded() const;
  // Whether every rank has all rows and the whole shared expert, but runs it for only part of the rows; this
  // rank's shared-expert output is zero for all other rows.
  bool shared_expert_rows_are_split() const;

 private:
  bool is_one_group_of_none() const;
  friend Result<MoePlan> plan_moe(const MoeProblem&, const MoeChoice&);
  Status choose_runner(const MoeChoice& choice);
  MoeProblem problem_;
  Numerics numerics_;
  Fabric fabric_;
  const A2aRow* a2a_ = nullptr;
  A2aSettings a2a_settings_;
  bool places_experts_ = false;
  const RunnerRow* runner_ = nullptr;
  Tactics tactics_;
  DeviceTactics device_tactics_;
  std::vector<RowVerdict> verdicts_;
  std::string note_;
};

// Chooses the first rows of the table that fit; a name given by the user is never replaced. kInvalidArgument:
// an unknown name (the message lists the known ones) or inconsistent sizes. kUnsupported: no row supports the
// combination; the message has the conflicting values and the nearest legal choice.
Result<MoePlan> plan_moe(const MoeProblem& problem, const MoeChoice& choice);

// The chosen runner's name; "none" for an empty plan.
const char* runner_name(const MoePlan& plan);

// The plan as text: problem, chosen rows, the runner-up, and why each other row was refused. Several lines,
// without a trailing newline.
std::string describe(const MoePlan& plan);

// The plan in one line: "w4a16 by cpu_avx2 over a2a none, fabric local; not cpu_avx512:
// needs avx512, but this CPU has avx2; runner-up cpu_scalar".
std::string summary(const MoePlan& plan);

// Valid flag values. Runners: "auto", the table's names, best first, then SGLang's names.
std::vector<std::string> runner_names();
std::vector<std::string> a2a_names();

}  // namespace fp4moe
