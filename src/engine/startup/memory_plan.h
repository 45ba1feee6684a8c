// Plans the memory for the weights and the KV pool before any weight is read.
#pragma once

#include <cstdint>
#include <string>

#include "fp4moe/config.h"
#include "fp4moe/status.h"
#include "io/checkpoint/checkpoint.h"
#include "model/plan_model.h"

namespace fp4moe {

// The memory that one process has and needs: on the CPU, all ranks of the process together; on GPUs, one rank
// on the GPU with the least free memory.
struct MemoryProblem {
  DeviceKind device = DeviceKind::kCpu;
  int64_t available_bytes = 0;    // free memory: this process's share of the machine's, or the GPU's
  int64_t weight_bytes = 0;       // the ranks' shards; packed weights are about as large
  int64_t kv_bytes_per_page = 0;  // of one page in each rank's pool
  // Separate pages of window layers (model/kv_window.h); 0 without them. Then kv_bytes_per_page is that of
  // the full layers.
  int64_t window_bytes_per_page = 0;
  int64_t state_bytes_per_slot = 0;     // of one slot in each rank's pool, with its replay rows; 0: the model
                                        // has no states
  int64_t most_state_slots = 0;         // most_state_slots() of a group
  int num_groups = 1;                   // data-parallel groups
  int64_t edit_bytes_per_page = 0;      // GPU: of the logit edits that drafts add (max_logit_edits())
  int64_t least_window_pages = 0;       // those of one request in decode
  int64_t wanted_window_pages = 0;      // for --max-running-requests and --max-prefill-tokens
  int64_t comm_bytes = 0;               // the ranks' heaps
  int64_t work_bytes = 0;               // GPU: activations, workspaces, graphs
  int64_t work_bytes_per_token = 0;     // the part of work_bytes that each token of --max-prefill-tokens adds
  int64_t max_position_embeddings = 0;  // in tokens
};

// Returns the bytes of a checkpoint tensor as a CPU stores it: bf16 matrices of dense layers according to
// `quant`, FP8 ones with their scales for each row (an upper bound).
int64_t held_bytes(const TensorEntry& tensor, DenseQuant quant);

// Returns the bytes of the LM head's copy of an embedding that is also used as the LM head.
int64_t head_bytes(const TensorEntry& embedding, DenseQuant quant);

// Returns the weight bytes of rank plan.moe.problem().layout.rank: each checkpoint tensor is whole, sharded
// over the attention group or sharded over all ranks. Exact except for shards of unequal size.
int64_t rank_weight_bytes(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan);

// Returns the same for the GPU's layout: experts in whole tiles, with their biases in f32.
int64_t device_weight_bytes(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan);

// Returns the weight bytes of rank `rank` on the plan's device.
int64_t weight_bytes_of_rank(const Checkpoint& checkpoint, const ModelConfig& config, ModelPlan plan,
                             int rank);

// Returns the problem for `checkpoint` in this process on this machine, with plan.draft and its separate
// checkpoint `draft`, if there are any; comm_bytes is left at 0. Fails only if a GPU's memory cannot be
// queried.
Result<MemoryProblem> memory_problem(const Checkpoint& checkpoint, const ModelConfig& config,
                                     const ModelPlan& plan, const EngineConfig& flags,
                                     const Checkpoint* draft = nullptr);

struct MemoryPlan {
  int64_t available_bytes = 0;
  int64_t budget_bytes = 0;      // mem_fraction_static of that, for weights, heaps, KV pool and a GPU's work
  int64_t num_kv_pages = 0;      // per data-parallel group
  int64_t num_window_pages = 0;  // the same, for window layers; 0: all layers use num_kv_pages
  int64_t num_slots = 0;         // the same, of states, with slot 0; 0: the model has no states
  int64_t max_running_requests = 0;  // --max-running-requests, or as many as have a slot
  int64_t context_length = 0;        // tokens of one request; fits in a group's pool
  std::string note;                  // why the context is shorter than the model's; empty if it is not
  std::string state_note;            // why fewer requests run at once than --max-running-requests; or empty
};

// Window pages: --swa-full-tokens-ratio times the full pages; without it, as many as all running requests
// need and, for the prefix cache, one for every 16 full pages. Never more than full pages.
//
// State slots: --max-mamba-cache-size or, without it, as many as fit beside the KV pages in a share of the
// rest of the budget that --mamba-full-memory-ratio gives, at most most_state_slots. If these are fewer than
// --max-running-requests needs, fewer requests run at once (then with a state_note).
//
// Without --max-total-tokens, the pool gets the rest of the budget, but at most a full context for every
// running request. Without --context-length, the context is the model's or, if the pool holds less, as long
// as the pool allows (then with a note). kDoesNotFit, which is also returned for a context longer than the
// model's, states the required and the available number, and a value that works.
Result<MemoryPlan> plan_memory(const MemoryProblem& problem, const EngineConfig& flags);

// Returns text such as "9.02 MiB" or "12.50 GiB".
std::string size_string(int64_t num_bytes);

}  // namespace fp4moe
