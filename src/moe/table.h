// The registration site of transports and runners: constexpr arrays of plain rows, best first, in table.cc.
// A new one is a source file and a row there; nothing else names it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "io/expert_weights.h"
#include "moe/expert_batch.h"
#include "moe/plan.h"

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

struct DispatchArgs {
  ActRows x;                     // [T, H]
  const int32_t* ids = nullptr;  // [T, K]: global ids; those that are not an expert's are dropped
  int64_t num_experts = 0, top_k = 0;
};

struct CombineArgs {
  const float* weights = nullptr;  // [T, K]
  int64_t num_tokens = 0, top_k = 0, hidden_size = 0;
  float* residual = nullptr;  // [T, H]: += sum over k, in top-k order, of weight * y; dropped slots count 0
};

// A transport.
struct A2aRow {
  const char* name;
  int max_ranks;
  EnumSet<BatchLayout> layouts;  // that dispatch can produce
  CombineContract combine_contract;
  int64_t (*scratch_bytes)(const MoeProblem&, int64_t max_tokens);
  ExpertBatch (*dispatch)(const DispatchArgs&, Arena&, ThreadPool&);
  void (*combine)(const ExpertBatch&, const CombineArgs&, ThreadPool&);
};

// One layer's experts in a runner's own layout.
struct PackedExperts {
  // Per expert, in the order in which a chunk reads them.
  Buffer gate_up;                   // [E][I / 16][gate, up] panels of K = H (up only where there is no gate)
  Buffer down;                      // [E][H / 16] panels of K = I
  std::vector<float> gate_up_bias;  // [E][I / 16][gate, up][16]
  std::vector<float> down_bias;     // [E][H]
  struct TensorScales {
    float gate = 1, up = 1, down = 1;
  };
  std::vector<TensorScales> scales;  // [E]

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

// What runs the experts.
struct RunnerRow {
  const char* name;
  DeviceKind device;
  Isa isa;                       // the lowest level it runs on
  EnumSet<BatchLayout> layouts;  // that it accepts
  EnumSet<Fp4Format> formats;
  EnumSet<Scheme> schemes;
  EnumSet<DType> act_dtypes;
  const ExpertOps& (*ops)();  // precondition: isa is available
  Result<PackedExperts> (*pack)(const RunnerRow&, const MoeProblem&, const MoeWeightsView&, ThreadPool&);
  int64_t (*scratch_bytes)(const MoeProblem&, int64_t max_rows);
  void (*run)(const RunnerRow&, const RunnerArgs&, Arena&, ThreadPool&);
};

// A name of SGLang's: what it stands for here.
struct RunnerAlias {
  const char* name;
  EnumSet<Fp4Format> formats;
  Scheme scheme;
};

// A name that users know and this version has no row for.
struct UnbuiltName {
  const char* name;
  const char* reason;
};

std::span<const A2aRow> a2a_rows();
std::span<const RunnerRow> runner_rows();
std::span<const RunnerAlias> runner_aliases();
std::span<const UnbuiltName> unbuilt_a2a();

// The transport of one rank (a2a_local.cc).
int64_t local_scratch_bytes(const MoeProblem& problem, int64_t max_tokens);
ExpertBatch local_dispatch(const DispatchArgs& args, Arena& scratch, ThreadPool& pool);
void local_combine(const ExpertBatch& batch, const CombineArgs& args, ThreadPool& pool);

// Runs any table of ExpertOps over panels (runner_panels.cc). Batches of either layout.
Result<PackedExperts> panels_pack(const RunnerRow& row, const MoeProblem& problem,
                                  const MoeWeightsView& weights, ThreadPool& pool);
int64_t panels_scratch_bytes(const MoeProblem& problem, int64_t max_rows);
void panels_run(const RunnerRow& row, const RunnerArgs& args, Arena& scratch, ThreadPool& pool);

}  // namespace fp4moe
