// Checks the errors that an engine's executor reports when the GPU fails, and that the failure is permanent.
// A process loses its device after a device error, so each case runs in a separate process.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/device_info.h"
#include "engine/ranks/rank_group.h"
#include "io/file.h"
#include "model/plan_draft.h"

namespace fp4moe {
namespace {

std::string model(const char* name) {
  const std::string models = file_exists(FP4MOE_MODELS) ? FP4MOE_MODELS : "models";
  return models + "/" + name;
}

enum class Steps { kLaunched, kWaitedFor, kRecorded };

constexpr int32_t kNowhere =
    (1 << 26) - 1;  // a page far outside the GPU's memory, whose row numbers still fit in 32 bits

// The ranks of a demo with these flags, and the checkpoint and plan to which the ranks refer.
struct DemoRanks {
  explicit DemoRanks(EngineConfig flags, const char* name = "demo-gptoss-mxfp4")
      : config(load_model_config(model(name)).value()),
        plan(plan_with_draft(config, std::move(flags), name)),
        checkpoint(Checkpoint::open(model(name)).value()),
        ranks(RankGroup::make(
                  checkpoint, config, plan, plan.flags,
                  {.max_batch_tokens = 16, .max_logit_rows = 16, .num_kv_pages = 4, .wants_logits = true})
                  .value()) {}
  static ModelPlan plan_with_draft(const ModelConfig& config, EngineConfig flags, const char* name) {
    flags.model_path = model(name);
    flags.device = "cuda";
    ModelPlan plan = plan_model(config, flags).value();
    plan.draft = plan_draft(config, plan).value();
    return plan;
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

// Makes the thread of `rank` sleep at once: a rank that is late because of a debugger, a page fault or a slow
// clock.
void delay_rank(int rank, std::chrono::milliseconds duration) {
  static std::atomic<int64_t> sleep_ms;
  sleep_ms = duration.count();
  struct sigaction action {};
  action.sa_handler = [](int) {
    const timespec time{sleep_ms / 1000, sleep_ms % 1000 * 1'000'000};
    nanosleep(&time, nullptr);
  };
  sigaction(SIGUSR2, &action, nullptr);
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    if (name == "rank " + std::to_string(rank))
      syscall(SYS_tgkill, getpid(), std::stoi(task.path().filename()), SIGUSR2);
  }
}

// Runs three steps of two ranks: rank 1 is in time, late by less than the deadline, and late by more. Then
// runs a step of new ranks. Writes each result to stderr, and whether the logits are those of the first step.
[[noreturn]] void delay_one_of_two(const char* a2a) {
  setenv("FP4MOE_RANKS_PER_GPU", "1", 1);
  EngineConfig flags;
  flags.tp_size = 2;
  flags.moe_a2a_backend = a2a;
  flags.comm_timeout = 1;
  const std::vector<int32_t> ids = {5}, pages = {0};
  const std::vector<int64_t> positions = {0}, logit_rows = {0};
  const std::vector<SequenceRows> sequences = {{0, 1, 0, pages}};
  const Batch batch{ids, positions, sequences, logit_rows};
  std::vector<float> first;
  std::string said;
  const auto run = [&](const DemoRanks& demo, std::chrono::milliseconds late) {
    if (late.count() > 0) delay_rank(1, late);
    const Status status = demo.ranks->execute_step({&batch, 1});
    said += "[" + status.to_string() + "]";
    if (!status.ok()) return;
    const float* const logits = demo.ranks->logits();
    const std::vector<float> now(logits, logits + demo.config.vocab_size);
    if (first.empty()) first = now;
    said += std::memcmp(now.data(), first.data(), now.size() * sizeof(float)) == 0 ? "same" : "different";
  };
  {
    const DemoRanks demo(flags);
    for (const int late : {0, 500, 2500}) run(demo, std::chrono::milliseconds(late));
  }
  const DemoRanks again(flags);
  run(again, {});
  again.report(said);
}

// Runs a step of two groups and two passes of their draft model. Rank 1 is late in the last pass. Writes each
// result to stderr.
[[noreturn]] void delay_a_draft_pass() {
  setenv("FP4MOE_RANKS_PER_GPU", "1", 1);
  EngineConfig flags;
  flags.tp_size = flags.dp_size = 2;
  flags.enable_dp_attention = true;
  flags.speculative_algorithm = "EAGLE";
  flags.comm_timeout = 1;
  const DemoRanks demo(flags, "demo-dsv3-nvfp4");
  const std::vector<int32_t> ids = {5}, pages = {0};
  const std::vector<int64_t> positions = {0}, rows = {0};
  const std::vector<SequenceRows> sequences = {{0, 1, 0, pages}};
  const Batch target{ids, positions, sequences, rows};
  Batch draft = target;
  draft.model = BatchModel::kDraft;
  draft.feature_rows = rows;
  std::string said;
  for (int i = 0; i < 3; ++i) {
    if (i == 1) demo.ranks->begin_drafts();
    if (i == 2) delay_rank(1, std::chrono::milliseconds(2500));
    const Batch& batch = i == 0 ? target : draft;
    said += "[" + demo.ranks->execute_step(std::vector<Batch>{batch, batch}).to_string() + "]";
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

TEST_F(DeviceFailure, OfALateRankNamesItAndTheOperation) {
  if (!device_info(1).ok()) GTEST_SKIP() << "needs two GPUs";
  for (const char* a2a : {"none", "deepep"})
    EXPECT_EXIT(
        delay_one_of_two(a2a), testing::ExitedWithCode(0),
        "\\[ok\\]same\\[ok\\]same\\[.*rank 0 waited 1.0 s for rank 1 in [a-z_]+.*\\]\\[ok\\]same failure "
        "\\[ok\\]");
}

TEST_F(DeviceFailure, OfALateDraftPassOfTwoGpusNamesTheDraftModel) {
  if (!device_info(1).ok()) GTEST_SKIP() << "needs two GPUs";
  EXPECT_EXIT(
      delay_a_draft_pass(), testing::ExitedWithCode(0),
      "\\[ok\\]\\[ok\\]\\[.*rank 0 waited 1.0 s for rank 1 in dispatch of the draft model, layer 0.*\\] "
      "failure \\[.*of the draft model");
}

TEST_F(DeviceFailure, OfARecordedStepSaysWhereItWasAndStays) {
  EXPECT_EXIT(fail(Steps::kRecorded), testing::ExitedWithCode(0),
              "\\[.*GPU, in the graph of 1 decode rows: device, in or after (layer 0, )?kernel [a-z_]+: "
              ".*illegal memory access.*\\]\\[.*in or after .*illegal memory access.*\\] failure \\[.*in or "
              "after .*illegal memory access");
}

}  // namespace
}  // namespace fp4moe
