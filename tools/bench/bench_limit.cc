#include "bench/bench_limit.h"

#include <algorithm>

#include "base/check.h"
#include "comm/job.h"
#include "io/write/dummy_checkpoint.h"
#include "model/plan_model.h"

namespace fp4moe {

Result<std::unique_ptr<LatencyLimit>> LatencyLimit::make(const EngineConfig& config, int threads,
                                                         int64_t cold_mib) {
  constexpr int kRepeats = 10;
  FP4MOE_ASSIGN_OR_RETURN(const ModelConfig model, load_model_config(config.model_path));
  FP4MOE_ASSIGN_OR_RETURN(const ModelPlan plan, plan_model(model, config));
  std::unique_ptr<LatencyLimit> limit;
  if (plan.device() != DeviceKind::kCpu || launcher_info().num_processes > 1) return limit;
  FP4MOE_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                          open_weights(config.model_path, config.load_format, model));
  limit.reset(new LatencyLimit(threads));
  limit->costs_ = model_costs(checkpoint, model, plan.dense_quant);
  FP4MOE_ASSIGN_OR_RETURN(limit->read_, ReadTest::make(cold_bytes(cold_mib), limit->pool_));
  const CpuPeakOps& ops = widest_ops();
  limit->dense_gflops_ = measure_dots(ops.bf16, kRepeats, limit->pool_).best;
  limit->expert_gflops_ = plan.moe.scheme() == Scheme::kW4A8
                              ? measure_dots(ops.int8, kRepeats, limit->pool_).best
                              : limit->dense_gflops_;
  return limit;
}

double LatencyLimit::step_seconds(double num_tokens, double num_logits, double read_gbps) const {
  const double dense = num_tokens * costs_.dense_flops + num_logits * costs_.head_flops;
  const double dots = dense / dense_gflops_ + num_tokens * costs_.expert_flops / expert_gflops_;
  return std::max(costs_.step_bytes(num_tokens) / read_gbps, dots) * 1e-9;
}

}  // namespace fp4moe
