// The registration site of transports and runners: constexpr arrays of plain rows, best first, in table.cc.
// A new one is a source file and a row there; nothing else names it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "io/expert_weights.h"
#include "kernels/device_moe.h"
#include "moe/act_scales.h"
#include "moe/calibration.h"
#include "moe/dense_mlp.h"
#include "moe/expert_batch.h"
#include "moe/fp4_linear.h"
#include "moe/moe_layer.h"
#include "moe/plan.h"
#include "moe/tactics.h"
#include "moe/transport.h"

namespace fp4moe {

// A set of enumerators of one enum whose values are small.
template <class Enum>
struct EnumSet {
  uint32_t bits = 0;
  constexpr EnumSet(std::initializer_list<Enum> members) {
    for (Enum m : members) bits |= 1u << static_cast<uint32_t>(m);
  }
  constexpr bool has(Enum m) const { return (bits >> static_cast<uint32_t>(m) & 1u) != 0; }
  constexpr bool meets(EnumSet other) const { return (bits & other.bits) != 0; }
};

// A transport. Rows of one name differ in the number of ranks that they connect.
struct A2aRow {
  const char* name;              // of --moe-a2a-backend
  int min_ranks, max_ranks;      // of the whole job
  EnumSet<BatchLayout> layouts;  // that next() makes
  CombineContract combine_contract;
  EnumSet<Payload> payloads;
  // Communicators: of all ranks, and of this rank's group (null where it is alone). Both outlive the object.
  Result<std::unique_ptr<Transport>> (*make)(const TransportOptions&, Communicator* world,
                                             Communicator* attention);
  // Bytes of the symmetric heap that make() uses from options.region_offset on.
  int64_t (*heap_bytes)(const TransportOptions&);
};

constexpr int kMaxRanks = 1024;

// A rank's part of one layer's experts in a runner's own layout.
struct PackedExperts {
  // Per expert, in the order in which a chunk reads them.
  Buffer gate_up;                   // [L][I / 16][gate, up] panels of K = H (up only where there is no gate)
  Buffer down;                      // [L][H / 16] panels of K = I
  std::vector<float> gate_up_bias;  // [L][I / 16][gate, up][16]
  std::vector<float> down_bias;     // [L][H]
  Numerics numerics;
  std::vector<ExpertScales> scales;  // [L]
  Tactics tactics;
  std::shared_ptr<ExpertAmax> amax;  // of bf16 experts: what their activations reach; null: nobody asks

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

// How a row makes layers; the precondition of all: it is the plan's runner.
struct LayerMakers {
  // MoeLayer::make.
  Result<std::unique_ptr<MoeLayer>> (*moe)(const MoePlan&, const DenseOps&, const RouterWeights&,
                                           const MoeWeightsView&, const SharedExpertWeights*, ThreadPool&);
  // A gated MLP of FP4 weights, the only expert of `weights`; the problem's sizes are its own.
  Result<std::unique_ptr<DenseMlp>> (*mlp)(const MoePlan&, const MoeProblem&, const MoeWeightsView& weights,
                                           ThreadPool&);
  // Fp4Linear::make.
  Result<std::unique_ptr<Fp4Linear>> (*linear)(const MoePlan&, const LinearWeightsView&, ThreadPool&);
};

// On a CPU: over ExpertOps, with any transport (host_layer.cc, dense_mlp.cc, fp4_linear.cc).
extern const LayerMakers kHostLayers;
// On a GPU: one rank, no transport (device_layer.cc, device_linear.cc).
extern const LayerMakers kDeviceLayers;

// What runs the experts.
struct RunnerRow {
  const char* name;
  DeviceKind device;
  Isa isa;                       // the lowest level it runs on
  int min_compute, max_compute;  // compute capabilities of a GPU that it runs on; 0 of a CPU
  EnumSet<BatchLayout> layouts;  // that it accepts
  int64_t row_align;             // rows of an expert that it takes at a time: moe_sort_tiles() where above 1
  EnumSet<Fp4Format> formats;
  EnumSet<Scheme> schemes;
  Act8 act8;  // of w4a8
  EnumSet<DType> act_dtypes;
  const LayerMakers* layers;
  // Of a CPU, null else. ops: precondition: isa is available.
  const ExpertOps& (*ops)();
  // Weights are those of all E experts, whole; the problem's layout says which part is packed.
  Result<PackedExperts> (*pack)(const RunnerRow&, const MoeProblem&, const Numerics&, const MoeWeightsView&,
                                ThreadPool&);
  int64_t (*scratch_bytes)(const MoeProblem&, const Numerics&, int64_t max_rows);
  void (*run)(const RunnerRow&, const RunnerArgs&, Arena&, ThreadPool&);
  // Of a GPU, null else: its ops under a scheme; returns null in a build without CUDA.
  const DeviceMoeOps* (*device_ops)(Scheme);
};

// A name of SGLang's: what it stands for here.
struct RunnerAlias {
  const char* name;
  EnumSet<Fp4Format> formats;
  Numerics packed, masked;  // of packed and of masked batches
};

std::span<const A2aRow> a2a_rows();
std::span<const RunnerRow> runner_rows();
std::span<const RunnerAlias> runner_aliases();
// The row of plain loops that other rows with these numerics are judged by.
const RunnerRow& oracle_row(const Numerics& numerics);

// The transport of one rank (a2a_local.cc): groups rows by expert in this rank's memory.
Result<std::unique_ptr<Transport>> make_local_transport(const TransportOptions& options, Communicator* world,
                                                        Communicator* attention);
int64_t local_heap_bytes(const TransportOptions& options);  // none

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

// Runs any table of ExpertOps over panels (pack_panels.cc, runner_panels.cc). Batches of either layout.
Result<PackedExperts> panels_pack(const RunnerRow& row, const MoeProblem& problem, const Numerics& numerics,
                                  const MoeWeightsView& weights, ThreadPool& pool);
// The same; kUnsupported for a row of MXFP4 weights that FP8 operands do not hold.
Result<PackedExperts> fp8_panels_pack(const RunnerRow& row, const MoeProblem& problem,
                                      const Numerics& numerics, const MoeWeightsView& weights,
                                      ThreadPool& pool);
int64_t panels_scratch_bytes(const MoeProblem& problem, const Numerics& numerics, int64_t max_rows);
void panels_run(const RunnerRow& row, const RunnerArgs& args, Arena& scratch, ThreadPool& pool);

// Runs experts that are not FP4 (runner_bf16.cc). PackedExperts then hold, in the layout of the dense ops,
// [L][gate, up][I, H] and [L][H, I], and gate_up_bias is [L][gate, up][I].
Result<PackedExperts> bf16_pack(const RunnerRow& row, const MoeProblem& problem, const Numerics& numerics,
                                const MoeWeightsView& weights, ThreadPool& pool);
int64_t bf16_scratch_bytes(const MoeProblem& problem, const Numerics& numerics, int64_t max_rows);
void bf16_run(const RunnerRow& row, const RunnerArgs& args, Arena& scratch, ThreadPool& pool);

}  // namespace fp4moe
