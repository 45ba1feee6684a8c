// How much memory the weights and the KV pool take, decided before any weight is read.
#pragma once

#include <cstdint>
#include <string>

#include "fp4moe/config.h"
#include "fp4moe/status.h"
#include "io/checkpoint.h"
#include "model/plan_model.h"

namespace fp4moe {

// Of one process; with several ranks in it, of all of them together.
struct MemoryProblem {
  DeviceKind device = DeviceKind::kCpu;
  int64_t available_bytes = 0;          // free now: this process's part of the machine, or of the GPU
  int64_t weight_bytes = 0;             // of the ranks' shards; packed weights are about as large
  int64_t kv_bytes_per_page = 0;        // of one page in each rank's pool
  int64_t comm_bytes = 0;               // the ranks' heaps
  int64_t work_bytes = 0;               // GPU: activations, workspaces, graphs
  int64_t work_bytes_per_token = 0;     // what of them each token of --max-prefill-tokens takes
  int64_t max_position_embeddings = 0;  // tokens the model was made for
};

// Of a checkpoint's tensor as a CPU holds it: dense layers' bf16 matrices by `quant`.
int64_t held_bytes(const TensorEntry& tensor, DenseQuant quant);

// Of an embedding that is the LM head too: the head's copy.
int64_t head_bytes(const TensorEntry& embedding, DenseQuant quant);

// Weights of rank plan.moe.problem().layout.rank: the checkpoint's bytes by what is whole, sharded over the
// attention group or over all ranks. Exact but for shards that do not come out even.
int64_t rank_weight_bytes(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan);

// The same in the GPU's layout: experts in whole tiles with their biases in f32.
int64_t device_weight_bytes(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan);

// Of `checkpoint` on this machine, in this process; comm_bytes is left 0. An error is the GPU's.
Result<MemoryProblem> memory_problem(const Checkpoint& checkpoint, const ModelConfig& config,
                                     const ModelPlan& plan, const EngineConfig& flags);

struct MemoryPlan {
  int64_t available_bytes = 0;
  int64_t budget_bytes = 0;    // mem_fraction_static of it: for weights, KV pool and a GPU's work
  int64_t num_kv_pages = 0;    // of each data-parallel group
  int64_t context_length = 0;  // of one request; never more than a group's pool holds
  std::string note;            // why the context is shorter than the model's, or empty
};

// Without --max-total-tokens the pool takes what the weights leave of the budget, at most a full context for
// every running request. Without --context-length the context is the model's or, with a note, what the pool
// holds. kDoesNotFit, such as for a context longer than the model's, holds both numbers, and what would work.
Result<MemoryPlan> plan_memory(const MemoryProblem& problem, const EngineConfig& flags);

// "9.02 MiB", "12.50 GiB".
std::string size_string(int64_t num_bytes);

}  // namespace fp4moe
