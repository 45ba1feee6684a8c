// Ranks of several processes, with a thread in place of each process, over ranks that record their calls:
// all of them run the same calls, tokens of all groups reach process 0, and errors and ends reach all
// processes.
#include "engine/ranks/process_group.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace fp4moe {
namespace {

using namespace std::chrono_literals;

constexpr int64_t kVocab = 40;

// One rank. Its tokens are 100 * rank + the row's index among all rows.
class RecordingRank final : public RankGroup {
 public:
  explicit RecordingRank(const RankLayout& layout) : layout_(layout) { config_.vocab_size = kVocab; }

  std::string calls;
  std::string fails_at;  // the name of a call

  const ModelConfig& config() const override { return config_; }
  int num_groups() const override { return layout_.dp; }
  int64_t num_kv_pages() const override { return 8; }
  int page_size() const override { return 4; }
  float* logits() override { return nullptr; }
  ThreadPool& pool() override { return pool_; }
  Status failure() const override { return {}; }
  Status follow() override { return {}; }
  void abort() override {}
  const Job* job() const override { return nullptr; }
  int64_t weight_bytes() const override { return 1; }
  int64_t kv_bytes() const override { return 2; }
  int64_t comm_bytes() const override { return 3; }
  ExpertLoad expert_load() const override { return {}; }

  Status execute_step(std::span<const Batch> groups) override {
    num_rows_.clear();
    for (const Batch& batch : groups) {
      calls += "step";
      for (const int32_t id : batch.token_ids) calls += " " + std::to_string(id);
      calls += "; ";
      num_rows_.push_back(batch.logit_rows.size());
    }
    return result_of("step");
  }
  Status set_masked_ids(std::span<const int32_t> ids) override {
    calls += "mask " + std::to_string(ids.size()) + "; ";
    return result_of("mask");
  }
  Status start_sample(std::span<const SampleRowParams> rows, std::span<const LogitEdit> edits,
                      std::span<const uint32_t> allowed, std::span<const int32_t> ids) override {
    calls += "sample";
    for (const SampleRowParams& row : rows) calls += " " + std::to_string(row.random);
    for (const LogitEdit& edit : edits) calls += " edit " + std::to_string(edit.token_id);
    for (const uint32_t word : allowed) calls += " mask " + std::to_string(word);
    for (const int32_t id : ids) calls += " id " + std::to_string(id);
    calls += "; ";
    return result_of("sample");
  }
  // Fills the rows of the rank's group, each with as many ids.
  Status take_sampled(std::span<SampledRow> out, std::span<float> id_logprobs) override {
    calls += "take; ";
    size_t first = 0;
    for (int g = 0; g < layout_.dp_rank(); ++g) first += num_rows_[static_cast<size_t>(g)];
    const size_t each = out.empty() ? 0 : id_logprobs.size() / out.size();
    for (size_t i = first; i < first + num_rows_[static_cast<size_t>(layout_.dp_rank())]; ++i) {
      out[i].token_id = 100 * layout_.rank + static_cast<int32_t>(i);
      for (size_t k = 0; k < each; ++k) id_logprobs[i * each + k] = static_cast<float>(layout_.rank) - 10;
    }
    return result_of("take");
  }

 protected:
  Status reload_ranks(const std::string&) override { return {}; }
  Result<ExpertMoves> move_experts() override { return ExpertMoves{}; }

 private:
  Status result_of(const char* call) const {
    return fails_at == call ? internal_error(std::string("no ") + call) : Status();
  }
  const RankLayout layout_;
  ModelConfig config_;
  ThreadPool pool_{1};
  std::vector<size_t> num_rows_;
};

// A batch of one sequence from position 0 on, with logits of its last row.
struct OneSequence {
  std::vector<int32_t> ids, pages = {0, 1};
  std::vector<int64_t> positions, logit_rows;
  SequenceRows sequence;

  explicit OneSequence(std::vector<int32_t> token_ids) : ids(std::move(token_ids)) {
    for (size_t i = 0; i < ids.size(); ++i) positions.push_back(static_cast<int64_t>(i));
    if (ids.empty()) return;
    logit_rows = {std::ssize(ids) - 1};
    sequence = {0, std::ssize(ids), 0, pages, {}};
  }
  Batch batch() const { return {ids, positions, std::span(&sequence, ids.empty() ? 0 : 1), logit_rows}; }
};

class ProcessGroups : public testing::Test {
 protected:
  void open(int tp, int dp) {
    layout_ = {.tp = tp, .ep = 1, .dp = dp};
    job_ = Job::open({.fabric = "threads",
                      .num_ranks = tp,
                      .heap_bytes = process_group_heap_bytes(tp),
                      .timeout_seconds = 10})
               .value();
    for (int r = 0; r < tp; ++r) {
      RankLayout own = layout_;
      own.rank = r;
      auto rank = std::make_unique<RecordingRank>(own);
      ranks_.push_back(rank.get());
      const StepLimits limits{.num_groups = dp,
                              .max_batch_tokens = 16,
                              .max_logit_rows = 8,
                              .num_kv_pages = 8,
                              .max_table_pages = 8,
                              .page_size = 4,
                              .vocab_size = kVocab,
                              .num_unknown_ids = 8};
      groups_.push_back(std::make_unique<ProcessGroup>(
          job_, nullptr, std::move(rank),
          ProcessGroupOptions{.layout = own, .limits = limits, .timeout = 10s}));
    }
    followed_.resize(groups_.size());
    for (size_t r = 1; r < groups_.size(); ++r)
      followers_.emplace_back([this, r] { followed_[r] = groups_[r]->follow(); });
  }
  ProcessGroup& leader() { return *groups_[0]; }
  // Ends process 0, and waits for the others.
  void end() {
    calls_of_first_ = ranks_[0]->calls;
    groups_[0].reset();
    for (std::thread& follower : followers_) follower.join();
    followers_.clear();
  }
  void TearDown() override {
    if (!followers_.empty()) end();
  }

  RankLayout layout_;
  std::shared_ptr<Job> job_;
  std::vector<std::unique_ptr<ProcessGroup>> groups_;
  std::vector<RecordingRank*> ranks_;
  std::vector<Status> followed_;
  std::vector<std::thread> followers_;
  std::string calls_of_first_;
};

TEST_F(ProcessGroups, AllRanksRunTheSameCalls) {
  open(3, 1);
  const int32_t masked[] = {5, 7};
  ASSERT_TRUE(leader().set_masked_ids(masked).ok());
  const OneSequence prompt({1, 2, 3}), next({~0});  // the second one's token is not known yet
  SampleRowParams row;
  row.random = 0.25;
  row.num_edits = 1;
  row.allowed = 0;
  row.num_logprob_ids = 2;
  row.top_logprobs = 0;
  const LogitEdit edit{.token_id = ~0};
  const uint32_t mask[] = {0xf, 0x1};
  const int32_t listed[] = {3, 4};
  for (const OneSequence* step : {&prompt, &next}) {
    const Batch batch = step->batch();
    ASSERT_TRUE(leader().execute_step({&batch, 1}).ok());
    ASSERT_TRUE(leader().start_sample({&row, 1}, {&edit, 1}, mask, listed).ok());
  }
  for (int i = 0; i < 2; ++i) {
    SampledRow sampled;
    float logprobs[2] = {};
    ASSERT_TRUE(leader().take_sampled({&sampled, 1}, logprobs).ok());
    EXPECT_EQ(sampled.token_id, 0);
    EXPECT_EQ(logprobs[1], -10);
  }
  end();
  const std::string sample = "sample 0.250000 edit -1 mask 15 mask 1 id 3 id 4; ";
  EXPECT_EQ(calls_of_first_, "mask 2; step 1 2 3; " + sample + "step -1; " + sample + "take; take; ");
  for (size_t r = 1; r < ranks_.size(); ++r) {
    EXPECT_EQ(ranks_[r]->calls, calls_of_first_) << r;
    EXPECT_TRUE(followed_[r].ok()) << followed_[r].to_string();
  }
}

// Group 0 has rank 0 and 1, group 1 the others; then group 1 alone has rows.
TEST_F(ProcessGroups, TokensOfOtherGroupsArrive) {
  open(4, 2);
  for (const bool both : {true, false}) {
    const OneSequence first(both ? std::vector<int32_t>{1, 2} : std::vector<int32_t>()), second({3, 4, 5});
    const std::vector<Batch> batches = {first.batch(), second.batch()};
    SampleRowParams row;
    row.top_logprobs = 0;
    row.num_logprob_ids = 1;
    std::vector<SampleRowParams> rows(both ? 2 : 1, row);
    if (both) rows[1].first_logprob_id = 1;
    const std::vector<int32_t> listed(rows.size(), 9);
    ASSERT_TRUE(leader().execute_step(batches).ok());
    ASSERT_TRUE(leader().start_sample(rows, {}, {}, listed).ok());
    std::vector<SampledRow> sampled(rows.size());
    std::vector<float> logprobs(rows.size());
    const Status taken = leader().take_sampled(sampled, logprobs);
    ASSERT_TRUE(taken.ok()) << taken.to_string();
    if (both) {
      EXPECT_EQ(sampled[0].token_id, 0);
      EXPECT_EQ(logprobs[0], -10);
    }
    EXPECT_EQ(sampled.back().token_id, both ? 201 : 200);
    EXPECT_EQ(logprobs.back(), -8);
  }
}

TEST_F(ProcessGroups, AnErrorOfAnyRankEndsAllByName) {
  for (const int failing : {0, 1}) {
    groups_.clear(), ranks_.clear();
    open(2, 1);
    ranks_[static_cast<size_t>(failing)]->fails_at = "step";
    const OneSequence prompt({1});
    const Batch batch = prompt.batch();
    Status status = leader().execute_step({&batch, 1});
    for (int i = 0; i < 500 && status.ok(); ++i) {  // the other process fails later
      std::this_thread::sleep_for(10ms);
      status = leader().failure();
    }
    EXPECT_EQ(status.message(), "rank " + std::to_string(failing) + ": no step");
    EXPECT_EQ(leader().execute_step({&batch, 1}).message(), status.message());
    end();
    EXPECT_EQ(followed_[1].message(), status.message());
  }
}

TEST_F(ProcessGroups, CommandsBeyondTheLimitsAreRefused) {
  const StepLimits limits{.max_logit_rows = 2, .vocab_size = kVocab, .num_unknown_ids = 1};
  const auto message = [&](const GroupCommand& command) {
    return decode_command(encode_command(command), limits).status().message();
  };
  const GroupCommand good{.kind = CommandKind::kSample, .rows = {SampleRowParams()}, .ids = {39}};
  EXPECT_EQ(message(good), "");
  EXPECT_EQ(message({.kind = CommandKind::kMask, .ids = {40}}), "a group's command: id 40");
  EXPECT_EQ(message({.kind = CommandKind::kSample, .rows = std::vector<SampleRowParams>(3)}),
            "a group's command: rows 3");
  EXPECT_EQ(message({.kind = CommandKind::kSample, .edits = {{.token_id = ~1}}}),
            "a group's command: edited id -2");
  EXPECT_EQ(message({.kind = CommandKind::kTake, .num_rows = 3}), "a group's command: rows 3");
  SampleRowParams row;
  row.num_edits = 1;
  EXPECT_EQ(message({.kind = CommandKind::kSample, .rows = {row}}), "a group's command: edits 1");
  const std::vector<uint8_t> bytes = encode_command(good);
  for (size_t size = 0; size < bytes.size(); ++size)
    EXPECT_EQ(decode_command({bytes.data(), size}, limits).status().code(), StatusCode::kDataLoss) << size;
}

// Ids of tokens that an earlier step samples, for ranks that know them on their device.
TEST(StepsOfProcesses, UnknownIdsAreLegalUpToTheirLimit) {
  const std::vector<int32_t> pages = {0};
  const std::vector<int64_t> positions = {0}, rows = {0};
  const SequenceRows sequence{0, 1, 0, pages};
  const auto message = [&](int32_t id, int64_t num_unknown_ids) {
    const StepLimits limits{.max_batch_tokens = 4,
                            .max_logit_rows = 4,
                            .num_kv_pages = 4,
                            .max_table_pages = 4,
                            .page_size = 4,
                            .vocab_size = 100,
                            .num_unknown_ids = num_unknown_ids};
    const std::vector<int32_t> ids = {id};
    const Batch batch{ids, positions, {&sequence, 1}, rows};
    StepBatches sent, received;
    sent.assign({&batch, 1});
    std::vector<uint8_t> bytes;
    sent.encode(bytes);
    const Status status = received.decode(bytes, limits);
    if (status.ok()) {
      EXPECT_EQ(received.batch(0).token_ids[0], id);
    }
    return status.message();
  };
  for (const int32_t id : {0, 99, ~0, ~2}) EXPECT_EQ(message(id, 3), "") << id;
  EXPECT_NE(message(~3, 3).find("token id"), std::string::npos);
  EXPECT_NE(message(~0, 0).find("token id"), std::string::npos);
}

}  // namespace
}  // namespace fp4moe
