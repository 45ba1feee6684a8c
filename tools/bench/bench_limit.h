// The CPU roofline that `bench latency` prints in each row.
#pragma once

#include <memory>

#include "base/thread_pool.h"
#include "bench/bench_cpu.h"
#include "bench/model_costs.h"

namespace fp4moe {

struct EngineConfig;

class LatencyLimit {
 public:
  // Returns null if no limit is known: on a GPU, or if several processes share the model. `threads` > 0.
  static Result<std::unique_ptr<LatencyLimit>> make(const EngineConfig& config, int threads,
                                                    int64_t cold_mib);

  // Measures memory read bandwidth now, in GB/s.
  double read_gbps() { return read_.gbps(); }
  // Returns the minimum seconds for one step of `num_tokens` tokens, `num_logits` of which go through the LM
  // head: the time to read the weights once at read_gbps, or to multiply at this CPU's dot-product rate,
  // whichever is longer.
  double step_seconds(double num_tokens, double num_logits, double read_gbps) const;

 private:
  explicit LatencyLimit(int threads) : pool_(threads) {}
  ThreadPool pool_;
  ReadTest read_;
  ModelCosts costs_;
  double dense_gflops_ = 0, expert_gflops_ = 0;
};

}  // namespace fp4moe
