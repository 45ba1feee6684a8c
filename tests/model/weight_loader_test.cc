#include "model/weight_loader.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "model/plan_model.h"

namespace fp4moe {
namespace {

// Padding and copies can make a rank's weights larger than the checkpoint.
TEST(WeightLoader, ProgressEndsAtTheCheckpointsBytes) {
  const std::string folder = FP4MOE_FIXTURES "/qwen2_h64_shared_expert";
  const ModelConfig config = load_model_config(folder).value();
  const ModelPlan plan = plan_model(config, {}).value();
  const Checkpoint checkpoint = Checkpoint::open(folder).value();
  ThreadPool pool(1);
  const ModelOptions options{
      .act_dtype = plan.act_dtype, .isa = plan.isa, .moe_plan = plan.moe, .max_batch_tokens = 1};
  std::vector<std::pair<int64_t, int64_t>> reports;
  const ProgressSink progress = [&](int64_t done, int64_t total) { reports.emplace_back(done, total); };
  WeightLoader loader(checkpoint, config, options, pool, progress);
  const int64_t total = checkpoint.total_bytes();
  loader.count(1000);
  loader.count(total - 1);
  loader.count(1);
  const std::vector<std::pair<int64_t, int64_t>> expected{{1000, total}, {total, total}, {total, total}};
  EXPECT_EQ(reports, expected);
}

}  // namespace
}  // namespace fp4moe
