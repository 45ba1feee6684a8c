// --enable-deterministic-inference on a GPU: the bits of a token's logits do not depend on the other rows of
// its step or on the split of its prompt into steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "engine/ranks/rank_group.h"
#include "io/checkpoint/checkpoint.h"
#include "io/file.h"
#include "model/plan_model.h"

namespace fp4moe {
namespace {

constexpr int64_t kMostSequences = 64, kPagesEach = 20;
constexpr RankGroupOptions kOptions{.max_batch_tokens = 4096,
                                    .max_logit_rows = kMostSequences,
                                    .num_kv_pages = kMostSequences * kPagesEach,
                                    .wants_logits = true};

// If the binary was built on another machine, the working folder is the repository's root.
std::string models() { return file_exists(FP4MOE_MODELS) ? FP4MOE_MODELS : "models"; }

struct Case {
  const char *model, *compute, *kv = "auto", *dense_quant = "none";
};

class DeviceInvariance : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    EngineConfig flags;
    flags.model_path = models() + "/" + GetParam().model;
    flags.device = "cuda";
    flags.fp4_compute = GetParam().compute;
    flags.kv_cache_dtype = GetParam().kv;
    flags.dense_quant = GetParam().dense_quant;
    flags.enable_deterministic_inference = true;
    config_ = load_model_config(flags.model_path).value();
    const ModelPlan plan = plan_model(config_, flags).value();
    const Checkpoint checkpoint = Checkpoint::open(flags.model_path).value();
    ranks_ = RankGroup::make(checkpoint, config_, plan, plan.flags, kOptions).value();
  }

  static std::vector<int32_t> tokens_of(int64_t sequence, int64_t count) {
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < count; ++i)
      ids.push_back(static_cast<int32_t>(3 + (sequence * 131 + i * i * 7 + i * 29) % 900));
    return ids;
  }
  // Prompt length of a sequence that runs together with sequence 0.
  static int64_t length_of(int64_t sequence) { return 1 + sequence * 17 % 90; }

  // Runs `rows[s]` tokens of sequence s, starting after its first done[s]. Returns the logits of the last
  // token of sequence 0, which is in the middle of the batch.
  std::vector<float> step(const std::vector<int64_t>& rows, std::vector<int64_t>& done) {
    std::vector<size_t> order(rows.size());
    std::iota(order.begin(), order.end(), 0);
    std::swap(order[0], order[order.size() / 2]);
    std::vector<int32_t> ids;
    std::vector<int64_t> positions, logit_rows;
    std::vector<SequenceRows> sequences;
    std::vector<std::vector<int32_t>> pages(rows.size());
    for (const size_t s : order) {
      for (int32_t i = 0; i < kPagesEach; ++i)
        pages[s].push_back(static_cast<int32_t>(s) * static_cast<int32_t>(kPagesEach) + i);
      const std::vector<int32_t> all = tokens_of(static_cast<int64_t>(s), done[s] + rows[s]);
      sequences.push_back({std::ssize(ids), rows[s], done[s], pages[s]});
      for (int64_t i = done[s]; i < done[s] + rows[s]; ++i) {
        ids.push_back(all[static_cast<size_t>(i)]);
        positions.push_back(i);
      }
      done[s] += rows[s];
      logit_rows.push_back(std::ssize(ids) - 1);
    }
    const Batch batch{ids, positions, sequences, logit_rows};
    const Status status = ranks_->execute_step({&batch, 1});
    EXPECT_TRUE(status.ok()) << status.to_string();
    const float* row = ranks_->logits() + static_cast<int64_t>(rows.size() / 2) * config_.vocab_size;
    return std::vector<float>(row, row + config_.vocab_size);
  }

  void expect_bits(const std::vector<float>& actual, const std::string& what) {
    ASSERT_EQ(actual.size(), whole_.size());
    int64_t different = 0;
    double largest = 0;
    for (size_t i = 0; i < actual.size(); ++i) {
      different += std::memcmp(&actual[i], &whole_[i], sizeof(float)) != 0;
      largest = std::max(largest, std::abs(static_cast<double>(actual[i]) - whole_[i]));
    }
    EXPECT_EQ(different, 0) << what << ": off by up to " << largest;
  }

  ModelConfig config_;
  std::unique_ptr<RankGroup> ranks_;
  std::vector<float> whole_;  // logits of the last token if the whole prompt runs in one step
};

TEST_P(DeviceInvariance, OfChunksAndCompany) {
  constexpr int64_t kPrompt = 301;  // exceeds the window of 128 tokens and spans many key tiles
  std::vector<int64_t> done{0};
  whole_ = step({kPrompt}, done);

  for (const std::vector<int64_t>& chunks : std::vector<std::vector<int64_t>>{{kPrompt - 1, 1},
                                                                              {1, kPrompt - 1},
                                                                              {7, 64, 100, 129, 1},
                                                                              {150, 16, 17, 100, 18},
                                                                              {290, 1, 2, 8}}) {
    done = {0};
    std::vector<float> last;
    for (const int64_t rows : chunks) last = step({rows}, done);
    expect_bits(last, std::to_string(chunks.size()) + " chunks, the first of " + std::to_string(chunks[0]));
  }

  for (const int64_t sequences : {2, 7, 16, 64}) {
    const auto n = static_cast<size_t>(sequences);
    std::vector<int64_t> first{kPrompt - 1};
    for (int64_t s = 1; s < sequences; ++s) first.push_back(length_of(s));
    std::vector<int64_t> whole = first;
    ++whole[0];
    done.assign(n, 0);
    expect_bits(step(whole, done), "prefill of " + std::to_string(n) + " sequences");
    done.assign(n, 0);
    step(first, done);
    expect_bits(step(std::vector<int64_t>(n, 1), done), "decode of " + std::to_string(n) + " sequences");
    done.assign(n, 0);
    step(first, done);
    std::vector<int64_t> mixed(n, 3);
    mixed[0] = 1;
    expect_bits(step(mixed, done), "decode beside prefill of " + std::to_string(n) + " sequences");
  }
}

INSTANTIATE_TEST_SUITE_P(Demos, DeviceInvariance,
                         testing::Values(Case{"demo-gptoss-mxfp4", "w4a16"},
                                         Case{"demo-gptoss-mxfp4", "w4a8"}, Case{"demo-dsv3-nvfp4", "w4a16"},
                                         Case{"demo-dsv3-nvfp4", "w4a4"}, Case{"demo-dsv3-nvfp4", "w4a8"},
                                         Case{"demo-gptoss-mxfp4", "w4a16", "fp8_e4m3"},
                                         Case{"demo-dsv3-nvfp4", "w4a16", "fp8_e4m3"},
                                         Case{"demo-gptoss-mxfp4", "w4a16", "auto", "fp8"},
                                         Case{"demo-dsv3-nvfp4", "w4a16", "fp8_e4m3", "fp8"}),
                         [](const auto& p) {
                           const std::string model = p.param.model;
                           const std::string quant = p.param.dense_quant;
                           return model.substr(5, model.find('-', 5) - 5) + "_" + p.param.compute + "_" +
                                  p.param.kv + (quant == "none" ? "" : "_dense_" + quant);
                         });

}  // namespace
}  // namespace fp4moe
