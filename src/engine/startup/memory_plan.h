// Plans the memory of the weights and the KV pool before any weight is read.
#pragma once

#include <cstdint>
#include <string>

#include "fp4moe/config.h"
#include "fp4moe/status.h"
#include "io/checkpoint/checkpoint.h"
#include "model/plan_model.h"

namespace fp4moe {

// For one process: if it has several ranks on the CPU, for all of them together; on GPUs, for one rank and
// the GPU that has the least free memory.
struct MemoryProblem {
  DeviceKind device = DeviceKind::kCpu;
  int64_t available_bytes = 0;          // free now: this process's share of the machine, or the GPU
  int64_t weight_bytes = 0;             // the ranks' shards; packed weights are about as large
  int64_t kv_bytes_per_page = 0;        // of one page in each rank's pool
  int64_t comm_bytes = 0;               // the ranks' heaps
  int64_t work_bytes = 0;               // GPU: activations, workspaces, graphs
  int64_t work_bytes_per_token = 0;     // the part of work_bytes that each token of --max-prefill-tokens adds
  int64_t max_position_embeddings = 0;  // in tokens
};

// Bytes of a checkpoint tensor as a CPU stores it: bf16 matrices of dense layers according to `quant`.
int64_t held_bytes(const TensorEntry& tensor, DenseQuant quant);

// Bytes of the LM head's copy of an embedding that is used as the LM head too.
int64_t head_bytes(const TensorEntry& embedding, DenseQuant quant);

// Weight bytes of rank plan.moe.problem().layout.rank: checkpoint tensors are whole, sharded over the
// attention group or sharded over all ranks. Exact except for shards of unequal size.
int64_t rank_weight_bytes(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan);

// The same in the GPU's layout: experts in whole tiles, with their biases in f32.
int64_t device_weight_bytes(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan);

// The problem for `checkpoint` in this process on this machine; comm_bytes is left 0. Errors come from the
// GPU.
Result<MemoryProblem> memory_problem(const Checkpoint& checkpoint, const ModelConfig& config,
                                     const ModelPlan& plan, const EngineConfig& flags);

struct MemoryPlan {
  int64_t available_bytes = 0;
  int64_t budget_bytes = 0;    // mem_fraction_static of it: weights, heaps, KV pool and a GPU's work_bytes
  int64_t num_kv_pages = 0;    // per data-parallel group
  int64_t context_length = 0;  // of one request; fits in a group's pool
  std::string note;            // why the context is shorter than the model's; empty if it is not
};

// Without --max-total-tokens the pool gets the budget that the weights leave, at most a full context for
// every running request. Without --context-length the context is the model's, or what the pool holds (then
// with a note). kDoesNotFit states both numbers and a value that works; also for a context longer than the
// model's.
Result<MemoryPlan> plan_memory(const MemoryProblem& problem, const EngineConfig& flags);

// "9.02 MiB", "12.50 GiB".
std::string size_string(int64_t num_bytes);

}  // namespace fp4moe
