// Drafts of the demos' trained draft models that ranks accept on their GPUs, with the step after in flight: a
// step loop's outputs are those of one that waits for the tokens of each step. With deterministic inference,
// which has the same bits for every batch.
#include <gtest/gtest.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "device/device.h"
#include "device/device_info.h"
#include "engine/drafting_loop.h"
#include "engine/ranks/draft_layouts.h"
#include "engine/ranks/trained_ranks.h"

namespace fp4moe {
namespace {

// Set before the first use of a GPU, which reads the variable; a value from outside stays.
const bool environment_is_set = [] {
  setenv("FP4MOE_RANKS_PER_GPU", "4", 0);
  return true;
}();

constexpr int64_t kRequests = 8, kPrompt = 64, kTokens = 64;

// A step loop over the ranks of a demo checkpoint with its draft model.
class TrainedLoop {
 public:
  TrainedLoop(const TrainedDraft& drafter, const EngineConfig& flags, bool accepts)
      : tokenizer_(Tokenizer::load(models() + "/" + drafter.model + "/tokenizer.json").value()),
        made_(drafter, flags,
              {.max_batch_tokens = 2 * kPrompt,
               .max_logit_rows = kRequests,
               .num_kv_pages = 64,
               .accepts_drafts = accepts}) {
    RankGroup& ranks = *made_.ranks;
    EXPECT_EQ(ranks.accepts_drafts(), accepts);
    const StepLoopOptions options{
        .scheduler = {.max_running_requests = ranks.num_groups() * kRequests,
                      .chunked_prefill_size = kPrompt,
                      .max_prefill_tokens = ranks.num_groups() * kPrompt,
                      .reuses_prefixes = true},
        .context_length = std::min<int64_t>(64 * ranks.page_size(), 4 * (kPrompt + kTokens)),
        .max_queued_requests = 100,
        .random_seed = 1,
        .max_model_drafts = made_.num_rows - 1};
    loop_ = StepLoop::make(ranks, tokenizer_, options).value();
  }

  // Runs all examples at the same time: greedily, but for `num_sampled` of them, and of different lengths.
  std::vector<Answer> run(const std::vector<std::vector<int32_t>>& prompts, size_t num_sampled) {
    std::vector<Collector> collectors(prompts.size());
    for (size_t i = 0; i < prompts.size(); ++i) {
      Request request{"", prompts[i]};
      request.sampling = {.temperature = i < num_sampled ? 0.7f : 0.0f,
                          .seed = i,
                          .max_new_tokens = kTokens - 3 * static_cast<int64_t>(i),
                          .top_logprobs = num_sampled > 0 ? 1 : -1};
      const auto id = loop_->submit(std::move(request), collectors[i].callback());
      if (!id.ok()) throw std::runtime_error(id.status().to_string());
    }
    std::vector<Answer> answers;
    for (Collector& collector : collectors) answers.push_back(collector.wait());
    return answers;
  }
  // Call at the end.
  EngineStats finish() {
    loop_->drain(60);
    const EngineStats stats = loop_->stats();
    EXPECT_EQ(stats.num_used_pages, 0);
    EXPECT_EQ(stats.num_leaked_pages, 0);
    return stats;
  }

 private:
  Tokenizer tokenizer_;
  TrainedRanks made_;
  std::unique_ptr<StepLoop> loop_;
};

EngineConfig on_gpu(bool graphs, const DraftLayout& layout) {
  EngineConfig flags = flags_of(layout);
  flags.device = "cuda";
  flags.disable_cuda_graph = !graphs;
  flags.enable_deterministic_inference = true;
  flags.comm_timeout = 20;
  return flags;
}

bool has_ranks(const DraftLayout& layout) { return device_info(gpu_of_rank(layout.tp - 1)).ok(); }

class GpuAcceptedDrafts : public testing::TestWithParam<TrainedDraft> {};
INSTANTIATE_TEST_SUITE_P(Demos, GpuAcceptedDrafts, testing::ValuesIn(kTrainedDrafts), trained_name);

// One rank, groups of one rank and of two, and groups that share requests unevenly.
constexpr DraftLayout kLayouts[] = {{1, 1, 1}, {2, 1, 1}, {2, 1, 2}, {4, 4, 2, "deepep"}};

// One request alone; then all, greedily; then all with log-probabilities, some of them drawn.
TEST_P(GpuAcceptedDrafts, HaveTheOutputsOfTokensThatAreWaitedFor) {
  const std::vector<std::vector<int32_t>> prompts = example_prompts(GetParam());
  for (const DraftLayout& layout : kLayouts)
    for (const bool graphs : {true, false}) {
      if (!has_ranks(layout)) continue;
      const std::string what = layout.text() + ", graphs " + std::to_string(graphs);
      std::vector<Answer> expected[3], actual[3];
      double lengths[2] = {};
      for (const bool accepts : {false, true}) {
        TrainedLoop loop(GetParam(), on_gpu(graphs, layout), accepts);
        std::vector<Answer>* const answers = accepts ? actual : expected;
        answers[0] = loop.run({prompts[0]}, 0);
        answers[1] = loop.run(prompts, 0);
        answers[2] = loop.run(prompts, 2);
        lengths[accepts] = loop.finish().spec_accept_length();
      }
      for (size_t run = 0; run < 3; ++run)
        for (size_t i = 0; i < expected[run].size(); ++i)
          expect_equal(actual[run][i], expected[run][i], what + ", request " + std::to_string(i));
      std::printf("%s: acceptance lengths %.3f and %.3f\n", what.c_str(), lengths[0], lengths[1]);
      EXPECT_GT(lengths[1], 0.9 * lengths[0]) << what;
    }
}

}  // namespace
}  // namespace fp4moe
