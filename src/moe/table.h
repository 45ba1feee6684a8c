// Registration of transports and runners: constexpr arrays of plain rows, best first, in table.cc. A new
// transport or runner needs one source file and one row there.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "io/checkpoint/expert_weights.h"
#include "kernels/device_moe.h"
#include "moe/act_scales.h"
#include "moe/calibration.h"
#include "moe/dense_mlp.h"
#include "moe/expert_batch.h"
#include "moe/fp4_linear.h"
#include "moe/moe_layer.h"
#include "moe/plan/plan.h"
#include "moe/plan/tactics.h"
#include "moe/transport/transport.h"

namespace fp4moe {

// A set of enumerators, whose values must be below 32.
template <class Enum>
struct EnumSet {
  uint32_t bits = 0;
  constexpr EnumSet(std::initializer_list<Enum> members) {
    for (Enum m : members) bits |= 1u << static_cast<uint32_t>(m);
  }
  constexpr bool has(Enum m) const { return (bits >> static_cast<uint32_t>(m) & 1u) != 0; }
  constexpr bool meets(EnumSet other) const { return (bits & other.bits) != 0; }
};

// A transport. Rows with the same name support different numbers of ranks.
struct A2aRow {
  const char* name;              // value of --moe-a2a-backend
  int min_ranks, max_ranks;      // supported number of ranks of the whole job
  EnumSet<BatchLayout> layouts;  // layouts that next() produces
  CombineContract combine_contract;
  EnumSet<Payload> payloads;  // supported payloads
  // `world` connects all ranks. `attention` connects this rank's group; it is null if the group is one rank,
  // and null or `world` if it is all ranks. Both communicators must outlive the transport.
  Result<std::unique_ptr<Transport>> (*make)(const TransportOptions&, Communicator* world,
                                             Communicator* attention);
  // Bytes of the symmetric heap that the transport uses, starting at options.region_offset.
  int64_t (*heap_bytes)(const TransportOptions&);
};

constexpr int kMaxRanks = 1024;

// A rank's part of one layer's experts in the runner's layout.
struct PackedExperts {
  // Per expert, in the order in which chunks read the panels.
  Buffer gate_up;                   // [L][I / 16][gate, up] panels of K = H (no gate: only up)
  Buffer down;                      // [L][H / 16] panels of K = I
  std::vector<float> gate_up_bias;  // [L][I / 16][gate, up][16]
  std::vector<float> down_bias;     // [L][H]
  Numerics numerics;
  std::vector<ExpertScales> scales;  // [L]
  Tactics tactics;
  std::shared_ptr<ExpertAmax> amax;  // bf16 experts: records max |activation|; null outside calibration

  int64_t num_bytes() const {
    return gate_up.num_bytes() + down.num_bytes() +
           static_cast<int64_t>((gate_up_bias.size() + down_bias.size()) * sizeof(float));
  }
};

struct RunnerArgs {
  const MoeProblem& problem;
  const PackedExperts& experts;
  const ExpertBatch& batch;  // y is written
};

// A row's layer factories. Precondition: the row is the plan's runner.
struct LayerMakers {
  // MoeLayer::make.
  Result<std::unique_ptr<MoeLayer>> (*moe)(const MoePlan&, const DenseOps&, const RouterWeights&,
                                           const MoeWeightsView&, const SharedExpertWeights*, ThreadPool&);
  // Makes a gated MLP with FP4 weights, given as the only expert of `weights`; the problem has the MLP's
  // sizes.
  Result<std::unique_ptr<DenseMlp>> (*mlp)(const MoePlan&, const MoeProblem&, const MoeWeightsView& weights,
                                           ThreadPool&);
  // Fp4Linear::make.
  Result<std::unique_ptr<Fp4Linear>> (*linear)(const MoePlan&, const LinearWeightsView&, ThreadPool&);
};

// CPU: run on ExpertOps, with any transport (host_layer.cc, dense_mlp.cc, fp4_linear.cc).
extern const LayerMakers kHostLayers;
// GPU: no Transport; layers of several ranks return partial sums or use a DeviceExchange (device_layer.cc).
extern const LayerMakers kDeviceLayers;

// A runner of experts.
struct RunnerRow {
  const char* name;  // value of --moe-runner-backend
  DeviceKind device;
  Isa isa;                       // CPU: the lowest ISA level that can run it
  int min_compute, max_compute;  // GPU: supported compute capabilities, 10 major + minor; CPU: 0
  EnumSet<BatchLayout> layouts;  // accepted layouts
  EnumSet<Fp4Format> formats;
  EnumSet<Scheme> schemes;
  Act8 act8;  // type of the activations with w4a8
  EnumSet<DType> act_dtypes;
  const LayerMakers* layers;
  // The next four are set for CPU rows and null for GPU rows. Precondition of ops(): `isa` is available.
  const ExpertOps& (*ops)();
  // `weights` are all E experts, unsharded; the problem's layout selects the part to pack.
  Result<PackedExperts> (*pack)(const RunnerRow&, const MoeProblem&, const Numerics&, const MoeWeightsView&,
                                ThreadPool&);
  int64_t (*scratch_bytes)(const MoeProblem&, const Numerics&, int64_t max_rows);
  void (*run)(const RunnerRow&, const RunnerArgs&, Arena&, ThreadPool&);
  // Set for GPU rows and null for CPU rows. Returns the ops for a scheme, or null in a build without CUDA.
  const DeviceMoeOps* (*device_ops)(Scheme);
};

// One of SGLang's backend names, mapped to numerics.
struct RunnerAlias {
  const char* name;
  EnumSet<Fp4Format> formats;
  Numerics packed, masked;  // for packed and for masked batches
};

std::span<const A2aRow> a2a_rows();
std::span<const RunnerRow> runner_rows();
std::span<const RunnerAlias> runner_aliases();
// The reference row (plain loops) against which other rows with these numerics are checked.
const RunnerRow& oracle_row(const Numerics& numerics);

// The single-rank transport (a2a_local.cc): groups rows by expert in this rank's memory.
Result<std::unique_ptr<Transport>> make_local_transport(const TransportOptions& options, Communicator* world,
                                                        Communicator* attention);
int64_t local_heap_bytes(const TransportOptions& options);  // returns 0

Result<std::unique_ptr<MoeLayer>> make_host_layer(const MoePlan& plan, const DenseOps& ops,
                                                  const RouterWeights& router, const MoeWeightsView& weights,
                                                  const SharedExpertWeights* shared, ThreadPool& pool);
Result<std::unique_ptr<DenseMlp>> make_host_mlp(const MoePlan& plan, const MoeProblem& problem,
                                                const MoeWeightsView& weights, ThreadPool& pool);
Result<std::unique_ptr<Fp4Linear>> make_host_linear(const MoePlan& plan, const LinearWeightsView& weights,
                                                    ThreadPool& pool);

Result<std::unique_ptr<MoeLayer>> make_device_layer(const MoePlan& plan, const DenseOps& ops,
                                                    const RouterWeights& router,
                                                    const MoeWeightsView& weights,
                                                    const SharedExpertWeights* shared, ThreadPool& pool);
Result<std::unique_ptr<DenseMlp>> make_device_mlp(const MoePlan& plan, const MoeProblem& problem,
                                                  const MoeWeightsView& weights, ThreadPool& pool);
Result<std::unique_ptr<Fp4Linear>> make_device_linear(const MoePlan& plan, const LinearWeightsView& weights,
                                                      ThreadPool& pool);

// The panel runner, for any table of ExpertOps (pack_panels.cc, runner_panels.cc). Accepts both layouts.
Result<PackedExperts> panels_pack(const RunnerRow& row, const MoeProblem& problem, const Numerics& numerics,
                                  const MoeWeightsView& weights, ThreadPool& pool);
// The same for FP8 operands; kUnsupported if the scales of an MXFP4 weight row span too many octaves for
// them.
Result<PackedExperts> fp8_panels_pack(const RunnerRow& row, const MoeProblem& problem,
                                      const Numerics& numerics, const MoeWeightsView& weights,
                                      ThreadPool& pool);
int64_t panels_scratch_bytes(const MoeProblem& problem, const Numerics& numerics, int64_t max_rows);
void panels_run(const RunnerRow& row, const RunnerArgs& args, Arena& scratch, ThreadPool& pool);

// The runner of bf16 experts (runner_bf16.cc). Its PackedExperts hold, in the dense ops' layout, gate_up
// [L][gate, up][I, H] and down [L][H, I]; gate_up_bias is [L][gate, up][I].
Result<PackedExperts> bf16_pack(const RunnerRow& row, const MoeProblem& problem, const Numerics& numerics,
                                const MoeWeightsView& weights, ThreadPool& pool);
int64_t bf16_scratch_bytes(const MoeProblem& problem, const Numerics& numerics, int64_t max_rows);
void bf16_run(const RunnerRow& row, const RunnerArgs& args, Arena& scratch, ThreadPool& pool);

}  // namespace fp4moe
