// Rank: one rank's pool, communicators, model shard and KV pages.
#pragma once

#include <memory>
#include <optional>

#include "base/thread_pool.h"
#include "comm/communicator.h"
#include "engine/comm_memory.h"
#include "engine/rank_config.h"
#include "engine/rank_group.h"
#include "model/kv_cache.h"

namespace fp4moe {

// What all ranks of a process load from.
struct RankSetup {
  const Checkpoint& checkpoint;
  const ModelConfig& config;
  const ModelPlan& plan;
  const EngineConfig& flags;
  const RankGroupOptions& options;
  const CommMemory& memory;
  int num_threads = 1;  // of each rank
};

class Rank {
 public:
  // `endpoint` is null where there is only one rank; else borrowed.
  Rank(const RankSetup& setup, int rank, Endpoint* endpoint);

  // With several ranks all of them call it: they agree on the smallest num_kv_pages of all first.
  Status load(const RankSetup& setup, const ProgressSink& progress);
  Status forward(const Batch& batch, float* logits);

  ThreadPool& pool() { return pool_; }
  const Model& model() const { return *model_; }
  const KvCache& kv() const { return kv_; }

 private:
  Result<int64_t> agree_on_pages(int64_t num_kv_pages);

  RankLayout layout_;
  ThreadPool pool_;
  std::optional<Communicator> world_, attention_;
  RankContext context_;
  std::unique_ptr<Model> model_;
  KvCache kv_;
};

}  // namespace fp4moe
