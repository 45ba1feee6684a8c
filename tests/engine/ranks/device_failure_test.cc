// Checks the errors that an engine's executor reports when the GPU fails, and that the failure is permanent.
// A process loses its device after a device error, so each case runs in a separate process.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/device_info.h"
#include "engine/ranks/rank_group.h"
#include "io/file.h"
#include "model/plan_model.h"

namespace fp4moe {
namespace {

std::string model() {
  const std::string models = file_exists(FP4MOE_MODELS) ? FP4MOE_MODELS : "models";
  return models + "/demo-gptoss-mxfp4";
}

enum class Steps { kLaunched, kWaitedFor, kRecorded };

constexpr int32_t kNowhere =
    (1 << 26) - 1;  // a page far outside the GPU's memory, whose row numbers still fit in 32 bits

// The ranks of the demo with these flags, and the checkpoint and plan to which the ranks refer.
struct DemoRanks {
  explicit DemoRanks(EngineConfig flags)
      : config(load_model_config(model()).value()),
        plan(plan_model(config, with_model(std::move(flags))).value()),
        checkpoint(Checkpoint::open(model()).value()),
        ranks(RankGroup::make(
                  checkpoint, config, plan, plan.flags,
                  {.max_batch_tokens = 16, .max_logit_rows = 4, .num_kv_pages = 4, .wants_logits = true})
                  .value()) {}
  static EngineConfig with_model(EngineConfig flags) {
    flags.model_path = model();
    flags.device = "cuda";
    return flags;
  }

  // Ends the process after it has written the steps' results and the ranks' failure to stderr.
  [[noreturn]] void report(const std::string& said) const {
    std::fprintf(stderr, "%s failure [%s]\n", said.c_str(), ranks->failure().to_string().c_str());
    std::_Exit(0);
  }

  const ModelConfig config;
  const ModelPlan plan;
  const Checkpoint checkpoint;
  const std::unique_ptr<RankGroup> ranks;
};

// Runs a step whose page is outside the GPU's memory, then a correct one; writes both results to stderr.
[[noreturn]] void fail(Steps steps) {
  if (steps == Steps::kWaitedFor) setenv("FP4MOE_CUDA_SYNC", "1", 1);
  EngineConfig flags;
  flags.disable_cuda_graph = steps != Steps::kRecorded;
  const DemoRanks demo(flags);
  std::string said;
  for (const int32_t page : {kNowhere, 0}) {
    const std::vector<int32_t> ids = {5}, pages = {page};
    const std::vector<int64_t> positions = {0}, logit_rows = {0};
    const std::vector<SequenceRows> sequences = {{0, 1, 0, pages}};
    const Batch batch{ids, positions, sequences, logit_rows};
    said += "[" + demo.ranks->execute_step({&batch, 1}).to_string() + "]";
  }
  demo.report(said);
}

// Runs a step of two groups on a GPU each, in which only rank 1's page is outside its GPU's memory, and then
// a correct step; writes both results, and the seconds of the first, to stderr.
[[noreturn]] void fail_one_of_two(const char* a2a) {
  setenv("FP4MOE_RANKS_PER_GPU", "1", 1);
  EngineConfig flags;
  flags.tp_size = flags.dp_size = 2;
  flags.enable_dp_attention = true;
  flags.moe_a2a_backend = a2a;
  flags.comm_timeout = 2;
  const DemoRanks demo(flags);
  std::string said;
  const std::vector<int32_t> ids = {5};
  const std::vector<int64_t> positions = {0}, logit_rows = {0};
  for (const int32_t page : {kNowhere, 0}) {
    const std::vector<int32_t> good = {0}, pages = {page};
    const std::vector<SequenceRows> first = {{0, 1, 0, good}}, second = {{0, 1, 0, pages}};
    const Batch batches[] = {{ids, positions, first, logit_rows}, {ids, positions, second, logit_rows}};
    const auto start = std::chrono::steady_clock::now();
    said += "[" + demo.ranks->execute_step(batches).to_string() + "]";
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    said += spent.count() < 2 * flags.comm_timeout + 2 ? "in time" : "late";
  }
  demo.report(said);
}

class DeviceFailure : public testing::Test {
 protected:
  DeviceFailure() { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

// Pages are prefetched while the device is still at an earlier kernel.
TEST_F(DeviceFailure, OfALaunchedStepSaysWhereItWasAndStays) {
  EXPECT_EXIT(fail(Steps::kLaunched), testing::ExitedWithCode(0),
              "\\[.*GPU, in a step of 1 rows: device.*: .*illegal memory access.*\\]"
              "\\[.*illegal memory access.*\\] failure \\[.*illegal memory access");
}

TEST_F(DeviceFailure, OfAStepThatIsWaitedForNamesKernelAndLayer) {
  EXPECT_EXIT(fail(Steps::kWaitedFor), testing::ExitedWithCode(0),
              "\\[.*kernel [a-z_0-9]+, layer 0: .*illegal memory access.*\\]");
}

TEST_F(DeviceFailure, OfOneOfTwoGpusEndsTheOthersWaitAndNamesTheRank) {
  if (!device_info(1).ok()) GTEST_SKIP() << "needs two GPUs";
  for (const char* a2a : {"none", "deepep", "flashinfer"})
    EXPECT_EXIT(fail_one_of_two(a2a), testing::ExitedWithCode(0),
                "\\[.*rank 1.*illegal memory access.*\\]in time\\[.*\\]in time failure \\[.*rank 1.*illegal "
                "memory access");
}

TEST_F(DeviceFailure, OfARecordedStepSaysWhereItWasAndStays) {
  EXPECT_EXIT(fail(Steps::kRecorded), testing::ExitedWithCode(0),
              "\\[.*GPU, in the graph of 1 decode rows: device, in or after (layer 0, )?kernel [a-z_]+: "
              ".*illegal memory access.*\\]\\[.*in or after .*illegal memory access.*\\] failure \\[.*in or "
              "after .*illegal memory access");
}

}  // namespace
}  // namespace fp4moe
