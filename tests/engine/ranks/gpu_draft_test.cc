// The demos' trained draft models on a GPU, pass by pass: their logits against the reference runner's, and
// the ids chosen on the device; recorded passes against launched ones, several ranks against one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "device/device.h"
#include "device/device_info.h"
#include "engine/ranks/growing.h"
#include "engine/startup/draft_checkpoint.h"
#include "engine/trained_drafts.h"
#include "model/plan_draft.h"

namespace fp4moe {
namespace {

// Set before the first use of a GPU, which reads the variable; a value from outside stays.
const bool environment_is_set = [] {
  setenv("FP4MOE_RANKS_PER_GPU", "4", 0);
  return true;
}();

// Rows of logits and the chosen ids of all passes of a draft model.
struct Drafts {
  std::vector<std::vector<float>> logits;
  std::vector<int32_t> ids;
};

// Three sequences in a target, each continued by a draft model. The tokens are given, so that two runs
// compute the same rows.
class Drafting {
 public:
  Drafting(const TrainedDraft& drafter, EngineConfig flags) {
    flags = with_trained_drafts(std::move(flags), drafter);
    flags.model_path = models() + "/" + drafter.model;
    if (!flags.speculative_draft_model_path.empty())
      flags.speculative_draft_model_path = models() + "/" + drafter.draft;
    config_ = load_model_config(flags.model_path).value();
    ModelPlan plan = plan_model(config_, flags).value();
    plan.draft = plan_draft(config_, plan).value();
    const Checkpoint target = Checkpoint::open(flags.model_path).value();
    const std::optional<Checkpoint> draft = open_draft(plan.draft.get(), config_, "auto").value();
    RankGroupOptions options = kOptions;
    options.max_logit_rows *= rows_per_request(plan.flags);
    auto made = RankGroup::make(target, config_, plan, plan.flags, options, draft ? &*draft : nullptr);
    if (!made.ok()) throw std::runtime_error(made.status().to_string());
    ranks_ = std::move(*made);
    for (int32_t s = 0; s < 3; ++s)
      for (int32_t i = 0; i < kPagesEach; ++i) pages_[s].push_back(s + 3 * (kPagesEach - 1 - i));
  }

  // The prompts, then chains of two passes and a step that verifies them. If `stay`, the host knows no draft
  // before the last step. Returns the logits of the draft model's rows and of the last step's, and the
  // drafts.
  Drafts chain(bool stay) {
    step(kPrompts, 0);
    drafts_ = {};
    first_id_ = ranks_->begin_drafts();
    std::vector<std::vector<int32_t>> rows(3);
    for (int32_t i = 0; i < 3; ++i) {
      Rows pass;
      for (size_t s = 0; s < 3; ++s) {
        rows[s].push_back(i == 0 ? id_at(s, first_[s]) : drafts_of_[s]);
        pass.feature_rows.push_back(static_cast<int64_t>(s));
        pass.logit_rows.push_back(static_cast<int64_t>(s));
        add(pass, s, {rows[s].back()}, first_[s] + i);
      }
      execute(pass.batch(BatchModel::kDraft, i > 0));
      for (size_t s = 0; s < 3; ++s) drafts_.logits.push_back(logits_of(s, ranks_->draft_shape().vocab_size));
      keep_ids(i, stay);
    }
    Rows target;
    for (size_t s = 0; s < 3; ++s) {
      rows[s].push_back(drafts_of_[s]);
      add(target, s, rows[s], first_[s]);
    }
    target.logit_rows.resize(target.ids.size());
    std::iota(target.logit_rows.begin(), target.logit_rows.end(), 0);
    execute(target.batch(BatchModel::kTarget, false));
    for (size_t row = 0; row < target.ids.size(); ++row)
      drafts_.logits.push_back(logits_of(row, config_.vocab_size));
    keep_ids(2, false);
    return std::move(drafts_);
  }

  // The prompts, then a step whose rows are extended with the tokens that they sample, before the host takes
  // them if `ahead`.
  Drafts extend(bool ahead) {
    step(kPrompts, 0);
    drafts_ = {};
    Rows target, draft;
    for (size_t s = 0; s < 3; ++s) add(target, s, {3, static_cast<int32_t>(s)}, first_[s]);
    target.logit_rows = {0, 1, 2, 3, 4, 5};
    execute(target.batch(BatchModel::kTarget, false));
    SampleRowParams greedy;
    greedy.temperature = 0;
    const std::vector<SampleRowParams> params(6, greedy);
    EXPECT_TRUE(ranks_->start_sample(params, {}, {}, {}).ok());
    std::vector<SampledRow> sampled(6);
    const auto take = [&] { EXPECT_TRUE(ranks_->take_sampled(sampled, {}).ok()); };
    if (!ahead) take();
    for (size_t s = 0; s < 3; ++s) {
      std::vector<int32_t> ids;
      for (size_t row = 2 * s; row < 2 * s + 2; ++row)
        ids.push_back(ahead ? ~static_cast<int32_t>(row) : sampled[row].token_id);
      add(draft, s, ids, first_[s]);
    }
    draft.feature_rows = draft.logit_rows = target.logit_rows;
    keep(draft.batch(BatchModel::kDraft, false));
    if (ahead) take();
    for (const SampledRow& row : sampled) drafts_.ids.push_back(row.token_id);
    return std::move(drafts_);
  }

  // The prompts, then steps whose rows are padded, one row each and several each; after each step two chained
  // passes. Wrong rows are dropped.
  Drafts run() {
    step(kPrompts, 0);
    for (int32_t i = 0; i < 3; ++i) {
      step({{i, 7, 8, 9}, {i + 1}, {5, i}}, i % 2);
      step({{3}, {i}, {9}}, 0);
    }
    return std::move(drafts_);
  }

 private:
  struct Rows {
    std::vector<int32_t> ids;
    std::vector<int64_t> positions, logit_rows, feature_rows;
    std::vector<SequenceRows> sequences;
    Batch batch(BatchModel model, bool chains) const {
      Batch out{ids, positions, sequences, logit_rows};
      out.model = model;
      if (model == BatchModel::kDraft) out.feature_rows = feature_rows;
      out.chains = chains;
      return out;
    }
  };
  static int32_t id_at(size_t s, int64_t position) {
    return static_cast<int32_t>((position * 37 + 11 * static_cast<int64_t>(s)) % 97);
  }

  // Runs the tokens, then the draft model's rows with the tokens after them.
  void step(const std::vector<std::vector<int32_t>>& more, int64_t num_dropped) {
    Rows target, draft;
    for (size_t s = 0; s < 3; ++s) {
      add(target, s, more[s], first_[s]);
      for (int64_t row = std::ssize(target.ids) - std::ssize(more[s]); row < std::ssize(target.ids); ++row)
        target.logit_rows.push_back(row);
    }
    if (std::ssize(target.ids) > 3 * 4) target.logit_rows = {std::ssize(target.ids) - 1};
    execute(target.batch(BatchModel::kTarget, false));
    int64_t target_row = 0;
    for (size_t s = 0; s < 3; ++s) {
      const int64_t count = std::max<int64_t>(1, std::ssize(more[s]) - num_dropped);
      std::vector<int32_t> next(more[s].begin() + 1, more[s].begin() + count);
      next.push_back(id_at(s, first_[s]));
      add(draft, s, next, first_[s]);
      for (int64_t i = 0; i < count; ++i) draft.feature_rows.push_back(target_row + i);
      draft.logit_rows.push_back(std::ssize(draft.ids) - 1);
      target_row += std::ssize(more[s]);
      first_[s] += count;
    }
    keep(draft.batch(BatchModel::kDraft, false));
    for (int64_t i = 0; i < 2; ++i) {
      Rows chained;
      for (size_t s = 0; s < 3; ++s) {
        chained.feature_rows.push_back(i == 0 ? draft.logit_rows[s] : static_cast<int64_t>(s));
        chained.logit_rows.push_back(static_cast<int64_t>(s));
        add(chained, s, {id_at(s, first_[s] + i + 1)}, first_[s] + i);
      }
      keep(chained.batch(BatchModel::kDraft, true));
    }
  }

  void add(Rows& rows, size_t s, const std::vector<int32_t>& ids, int64_t first_position) const {
    rows.sequences.push_back({std::ssize(rows.ids), std::ssize(ids), first_position, pages_[s], {}});
    rows.ids.insert(rows.ids.end(), ids.begin(), ids.end());
    for (int64_t i = 0; i < std::ssize(ids); ++i) rows.positions.push_back(first_position + i);
  }

  void execute(const Batch& batch) {
    const Status status = ranks_->execute_step({&batch, 1});
    ASSERT_TRUE(status.ok()) << status.to_string();
  }
  // Runs a pass of the draft model and checks that each chosen id is the one with the largest logit.
  void keep(const Batch& batch) {
    first_id_ = ranks_->begin_drafts();
    execute(batch);
    std::vector<int32_t> ids(batch.logit_rows.size());
    const Status status = ranks_->take_draft_ids(first_id_, ids);
    ASSERT_TRUE(status.ok()) << status.to_string();
    for (size_t i = 0; i < ids.size(); ++i) {
      drafts_.logits.push_back(logits_of(i, ranks_->draft_shape().vocab_size));
      const int32_t id = best(drafts_.logits.back());
      EXPECT_EQ(ids[i], target_id(id, ranks_->draft_token_ids(), config_.vocab_size));
    }
    drafts_.ids.insert(drafts_.ids.end(), ids.begin(), ids.end());
  }
  std::vector<float> logits_of(size_t row, int64_t vocab_size) const {
    const float* first = ranks_->logits() + static_cast<int64_t>(row) * vocab_size;
    return {first, first + vocab_size};
  }

  // Sets the drafts of pass i: unknown ones if they stay.
  void keep_ids(int32_t i, bool stay) {
    drafts_.ids.resize(static_cast<size_t>(3 * (i + 1)));
    if (!stay) {
      const Status status = ranks_->take_draft_ids(first_id_, drafts_.ids);
      ASSERT_TRUE(status.ok()) << status.to_string();
    }
    for (size_t s = 0; s < 3; ++s) {
      const int32_t row = 3 * i + static_cast<int32_t>(s);
      drafts_of_[s] = stay ? ~(first_id_ + row) : drafts_.ids[static_cast<size_t>(row)];
    }
  }

  ModelConfig config_;
  std::unique_ptr<RankGroup> ranks_;
  int32_t first_id_ = 0, drafts_of_[3] = {};  // the last drafts
  std::vector<int32_t> pages_[3];
  int64_t first_[3] = {};  // position of each sequence's next token
  Drafts drafts_;
};

EngineConfig on_gpu(bool graphs, bool deterministic = false, int tp = 1) {
  EngineConfig flags;
  flags.device = "cuda";
  flags.disable_cuda_graph = !graphs;
  flags.enable_deterministic_inference = deterministic;
  flags.tp_size = tp;
  flags.comm_timeout = 20;
  return flags;
}

class GpuDrafts : public testing::TestWithParam<TrainedDraft> {};
INSTANTIATE_TEST_SUITE_P(Demos, GpuDrafts, testing::ValuesIn(kTrainedDrafts), trained_name);

// In bf16 a token can go to another expert, which changes its row and, through attention, later ones.
TEST_P(GpuDrafts, AreNearThoseOfTheReferenceRunner) {
  EngineConfig reference;
  reference.device = "cpu";
  reference.dtype = "float32";
  reference.moe_runner_backend = "ref";
  const Drafts expected = Drafting(GetParam(), reference).run();
  const Drafts actual = Drafting(GetParam(), on_gpu(true)).run();
  ASSERT_EQ(actual.logits.size(), expected.logits.size());
  ASSERT_EQ(actual.logits.size(), 7u * 9u);
  std::vector<double> errors;
  int num_equal = 0;
  for (size_t i = 0; i < expected.logits.size(); ++i) {
    errors.push_back(relative_l2(actual.logits[i], expected.logits[i]));
    num_equal += actual.ids[i] == expected.ids[i];
  }
  std::ranges::sort(errors);
  std::printf("median error %.4f, largest %.4f, %d of %zu ids equal\n", errors[errors.size() / 2],
              errors.back(), num_equal, errors.size());
  EXPECT_LT(errors[errors.size() / 2], 3e-2);
  EXPECT_GT(errors[0], 1e-6) << "bf16 cannot be this close";
  EXPECT_GT(num_equal, 50) << "of 63";
}

TEST_P(GpuDrafts, RecordedPassesHaveTheBitsOfLaunchedOnes) {
  for (const bool deterministic : {false, true}) {
    const Drafts recorded = Drafting(GetParam(), on_gpu(true, deterministic)).run();
    const Drafts launched = Drafting(GetParam(), on_gpu(false, deterministic)).run();
    EXPECT_EQ(recorded.logits, launched.logits) << deterministic;
    EXPECT_EQ(recorded.ids, launched.ids) << deterministic;
  }
}

// Drafts that stay on the device are read there by later passes and by the step that verifies them.
TEST_P(GpuDrafts, ThatStayHaveTheBitsOfKnownOnes) {
  for (const int tp : {1, 2})
    for (const bool graphs : {true, false}) {
      if (!device_info(gpu_of_rank(tp - 1)).ok()) continue;
      const Drafts known = Drafting(GetParam(), on_gpu(graphs, false, tp)).chain(/*stay=*/false);
      const Drafts kept = Drafting(GetParam(), on_gpu(graphs, false, tp)).chain(/*stay=*/true);
      EXPECT_EQ(known.logits.size(), 3u * 3u + 3u * 4u);
      EXPECT_EQ(kept.logits, known.logits) << "tp " << tp << ", graphs " << graphs;
      EXPECT_EQ(kept.ids, known.ids) << "tp " << tp << ", graphs " << graphs;
      EXPECT_EQ(known.ids.size(), 9u);
      EXPECT_GE(std::ranges::min(known.ids), 0);
    }
}

TEST_P(GpuDrafts, OfTokensThatStayHaveTheBitsOfKnownOnes) {
  for (const int tp : {1, 2})
    for (const bool graphs : {true, false}) {
      if (!device_info(gpu_of_rank(tp - 1)).ok()) continue;
      const Drafts known = Drafting(GetParam(), on_gpu(graphs, false, tp)).extend(/*ahead=*/false);
      const Drafts ahead = Drafting(GetParam(), on_gpu(graphs, false, tp)).extend(/*ahead=*/true);
      EXPECT_EQ(known.logits.size(), 6u);
      EXPECT_EQ(ahead.logits, known.logits) << "tp " << tp << ", graphs " << graphs;
      EXPECT_EQ(ahead.ids, known.ids) << "tp " << tp << ", graphs " << graphs;
      EXPECT_EQ(known.ids.size(), 12u);
    }
}

TEST_P(GpuDrafts, DeterministicRanksHaveTheBitsOfOne) {
  const Drafts one = Drafting(GetParam(), on_gpu(true, true)).run();
  for (const int tp : {2, 4}) {
    if (!device_info(gpu_of_rank(tp - 1)).ok()) continue;
    const Drafts several = Drafting(GetParam(), on_gpu(true, true, tp)).run();
    EXPECT_EQ(several.logits, one.logits) << "tp " << tp;
    EXPECT_EQ(several.ids, one.ids) << "tp " << tp;
  }
}

}  // namespace
}  // namespace fp4moe
