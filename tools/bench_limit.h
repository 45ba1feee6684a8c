// The limit that `bench latency` prints beside a row on a CPU.
#pragma once

#include <memory>

#include "base/thread_pool.h"
#include "bench_cpu.h"
#include "model_costs.h"

namespace fp4moe {

struct EngineConfig;

class LatencyLimit {
 public:
  // Null where there is none to state: on a GPU, and where other processes share the model. `threads` > 0.
  static Result<std::unique_ptr<LatencyLimit>> make(const EngineConfig& config, int threads,
                                                    int64_t cold_mib);

  // GB/s of memory, now.
  double read_gbps() { return read_.gbps(); }
  // Seconds of one step of so many tokens, of which `num_logits` go through the LM head: weights once at
  // read_gbps, or the multiplies at this CPU's dot products, whichever takes longer.
  double step_seconds(double num_tokens, double num_logits, double read_gbps) const;

 private:
  explicit LatencyLimit(int threads) : pool_(threads) {}
  ThreadPool pool_;
  ReadTest read_;
  ModelCosts costs_;
  double dense_gflops_ = 0, expert_gflops_ = 0;
};

}  // namespace fp4moe
