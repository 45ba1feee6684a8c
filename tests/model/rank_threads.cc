#include "rank_threads.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>

#include "base/check.h"
#include "comm/job.h"
#include "io/checkpoint/checkpoint.h"
#include "model/draft_models.h"
#include "model/kv_cache.h"
#include "model/model.h"
#include "model/plan_draft.h"
#include "model/plan_model.h"
#include "moe/transport/transport.h"

namespace fp4moe {
namespace {

constexpr int64_t kRecordBytes = 64 << 10, kStagingBytes = 4096;  // small, so that operands are sent in
                                                                  // pieces

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Shared by all ranks of a run.
struct Shared {
  const RankRun& run;
  const std::vector<std::vector<int32_t>>& prompts;
  ModelConfig config;
  ModelPlan plan;
  Checkpoint checkpoint;
  std::unique_ptr<Job> job;  // null: one rank

  int64_t longest() const {
    size_t most = 0;
    for (const auto& prompt : prompts) most = std::max(most, prompt.size());
    return static_cast<int64_t>(most);
  }
};

// One rank, in its own thread.
class Rank {
 public:
  Rank(const Shared& shared, int rank) : s_(shared) {
    context_.layout = s_.plan.moe.problem().layout;
    context_.layout.rank = rank;
  }

  Status load() {
    const RankLayout& layout = context_.layout;
    if (s_.job != nullptr) connect(s_.job->endpoint(layout.rank));
    const int64_t groups = layout.dp;
    const ModelOptions options{.act_dtype = s_.plan.act_dtype,
                               .kv_dtype = s_.plan.kv_dtype,
                               .isa = s_.plan.isa,
                               .moe_plan = s_.plan.moe.at_rank(layout.rank),
                               .max_batch_tokens = s_.run.chunk,
                               .max_logit_rows = s_.run.chunk * groups,
                               .dp_lm_head = s_.run.flags.enable_dp_lm_head,
                               .rank = context_,
                               .dense_quant = s_.plan.dense_quant,
                               .features = {.is_final_norm = drafts(), .after_layers = {}}};
    FP4MOE_ASSIGN_OR_RETURN(model_, Model::load(s_.checkpoint, s_.config, options, pool_, {}));
    const int64_t tokens = s_.longest() + s_.run.num_chained;
    const int64_t pages = std::max<int64_t>(1, (tokens + s_.run.page_size - 1) / s_.run.page_size);
    FP4MOE_ASSIGN_OR_RETURN(kv_, KvCache::make(s_.config, s_.plan.kv_dtype,
                                               {.full = pages, .slots = StateCache::slots_for(s_.config, 1)},
                                               s_.run.page_size, layout));
    if (drafts()) FP4MOE_RETURN_IF_ERROR(load_draft(options, pages));
    pages_.resize(static_cast<size_t>(pages));
    std::iota(pages_.rbegin(), pages_.rend(), 0);  // not in memory order
    return {};
  }

  Status run() {
    const auto& prompt = s_.prompts[static_cast<size_t>(context_.layout.dp_rank())];
    const int64_t rows = s_.longest() - (drafts() ? 1 : 0);
    for (int64_t first = 0; first < rows; first += s_.run.chunk)
      FP4MOE_RETURN_IF_ERROR(drafts() ? draft_step(prompt, first) : step(prompt, first));
    for (int64_t i = 0; i < s_.run.num_chained; ++i)
      FP4MOE_RETURN_IF_ERROR(chain(std::ssize(prompt) - 1 + i));
    return {};
  }

  std::vector<float> logits;
  Status status;

 private:
  void connect(Endpoint& endpoint) {
    const RankLayout& layout = context_.layout;
    const int64_t world_bytes = Communicator::heap_bytes(layout.tp, kRecordBytes, kStagingBytes);
    world_.emplace(endpoint, 0, layout.tp, CommRegion{0, kRecordBytes, kStagingBytes, 0}, CommOptions{});
    context_.world = &*world_;
    context_.a2a_region_offset = 2 * aligned(world_bytes);
    if (layout.attention_tp() == 1) return;
    context_.attention = context_.world;
    if (layout.dp == 1) return;
    attention_.emplace(endpoint, layout.dp_rank() * layout.attention_tp(), layout.attention_tp(),
                       CommRegion{aligned(world_bytes), kRecordBytes, kStagingBytes, kCommSlots},
                       CommOptions{});
    context_.attention = &*attention_;
  }

  bool drafts() const { return s_.run.num_chained > 0; }

  Status load_draft(const ModelOptions& options, int64_t pages) {
    DraftModelOptions draft{s_.plan.draft->algorithm, s_.plan.draft->config, options};
    draft.model.moe_plan = s_.plan.draft->plan.moe.at_rank(context_.layout.rank);
    FP4MOE_ASSIGN_OR_RETURN(draft_, load_draft_model(s_.checkpoint, draft, *model_, pool_, {}));
    FP4MOE_ASSIGN_OR_RETURN(draft_kv_, KvCache::make(draft_->config(), s_.plan.kv_dtype, {.full = pages},
                                                     s_.run.page_size, context_.layout));
    return {};
  }

  // Runs the target for prompt rows, with logits for none, and the MTP layer with their next tokens.
  Status draft_step(const std::vector<int32_t>& prompt, int64_t first) {
    const int64_t rows = std::clamp<int64_t>(std::ssize(prompt) - 1 - first, 0, s_.run.chunk);
    std::vector<int64_t> positions(static_cast<size_t>(rows));
    std::iota(positions.begin(), positions.end(), first);
    const SequenceRows sequence{0, rows, first, pages_};
    const auto ids = [&](int64_t from) {
      return std::span(prompt).subspan(static_cast<size_t>(rows > 0 ? from : 0), static_cast<size_t>(rows));
    };
    Batch batch{ids(first), positions, {&sequence, static_cast<size_t>(rows > 0)}, {}};
    FP4MOE_RETURN_IF_ERROR(model_->forward_model(batch, kv_, nullptr, pool_));
    batch.token_ids = ids(first + 1);
    return draft(batch, rows);
  }

  // Runs the MTP layer for the choice of the last row, if there is one, with that row's own features.
  Status chain(int64_t position) {
    const int64_t v = s_.config.vocab_size;
    const size_t rows = logits.empty() ? 0 : 1;
    int32_t id = 0;
    if (rows > 0)
      id = static_cast<int32_t>(std::max_element(logits.end() - v, logits.end()) - logits.end() + v);
    const SequenceRows sequence{0, 1, position, pages_};
    Batch batch{{&id, rows}, {&position, rows}, {&sequence, rows}, {}};
    batch.chains = true;
    return draft(batch, static_cast<int64_t>(rows));
  }

  // `batch` takes the features of the last rows of the pass before.
  Status draft(Batch& batch, int64_t rows) {
    std::vector<int64_t> features(static_cast<size_t>(rows)), logit_rows(features);
    std::iota(logit_rows.begin(), logit_rows.end(), 0);
    const Features from = (batch.chains ? *draft_ : *model_).features();
    std::iota(features.begin(), features.end(), from.num_rows - rows);
    batch.model = BatchModel::kDraft;
    batch.feature_rows = features;
    batch.logit_rows = logit_rows;
    const size_t at = logits.size();
    logits.resize(at + logit_rows.size() * static_cast<size_t>(s_.config.vocab_size));
    return draft_->forward_model(batch, draft_kv_, logits.data() + at, pool_);
  }

  Status step(const std::vector<int32_t>& prompt, int64_t first) {
    const int64_t length =
        static_cast<int64_t>(prompt.size()) - (context_.layout.rank == s_.run.short_rank ? 1 : 0);
    const int64_t rows = std::clamp<int64_t>(length - first, 0, s_.run.chunk);
    std::vector<int64_t> positions(static_cast<size_t>(rows)), logit_rows;
    std::iota(positions.begin(), positions.end(), first);
    for (int64_t row = s_.run.last_row_only ? rows - 1 : 0; row >= 0 && row < rows; ++row)
      logit_rows.push_back(row);
    const SequenceRows sequence{.num_rows = rows, .first_position = first, .page_table = pages_, .slot = 1};
    const std::span<const int32_t> ids(rows > 0 ? prompt.data() + first : nullptr, static_cast<size_t>(rows));
    const size_t at = logits.size();
    const bool wanted = !s_.run.first_rank_only || context_.layout.attention_rank() == 0;
    if (wanted) logits.resize(at + logit_rows.size() * static_cast<size_t>(s_.config.vocab_size));
    return model_->forward_model({ids, positions, {&sequence, static_cast<size_t>(rows > 0)}, logit_rows},
                                 kv_, wanted ? logits.data() + at : nullptr, pool_);
  }

  const Shared& s_;
  RankContext context_;
  ThreadPool pool_{1};
  std::optional<Communicator> world_, attention_;
  std::unique_ptr<Model> model_, draft_;
  KvCache kv_, draft_kv_;
  std::vector<int32_t> pages_;
};

Status open_job(Shared& s) {
  const MoePlan& plan = s.plan.moe;
  const RankLayout& layout = plan.problem().layout;
  if (layout.tp == 1) return {};
  const int64_t comm = Communicator::heap_bytes(layout.tp, kRecordBytes, kStagingBytes);
  JobOptions options;
  options.fabric = "threads";
  options.num_ranks = layout.tp;
  int64_t a2a = transport_heap_bytes(plan, s.run.chunk);
  if (s.plan.draft != nullptr) a2a = std::max(a2a, transport_heap_bytes(s.plan.draft->plan.moe, s.run.chunk));
  options.heap_bytes = 2 * aligned(comm) + aligned(a2a);
  FP4MOE_ASSIGN_OR_RETURN(s.job, Job::open(options));
  return {};
}

}  // namespace

Result<std::vector<std::vector<float>>> run_ranks(const RankRun& run,
                                                  const std::vector<std::vector<int32_t>>& prompts) {
  FP4MOE_ASSIGN_OR_RETURN(ModelConfig config, load_model_config(run.folder));
  FP4MOE_ASSIGN_OR_RETURN(ModelPlan plan, plan_model(config, run.flags));
  if (run.num_chained > 0) plan.flags.speculative_algorithm = "EAGLE";
  FP4MOE_ASSIGN_OR_RETURN(plan.draft, plan_draft(config, plan));
  FP4MOE_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::open(run.folder));
  Shared shared{run, prompts, std::move(config), std::move(plan), std::move(checkpoint), nullptr};
  FP4MOE_RETURN_IF_ERROR(open_job(shared));
  const RankLayout& layout = shared.plan.moe.problem().layout;
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int r = 0; r < layout.tp; ++r) ranks.push_back(std::make_unique<Rank>(shared, r));
  std::vector<std::thread> threads;
  for (const auto& rank : ranks)
    threads.emplace_back([&shared, &rank = *rank] {
      rank.status = rank.load();
      if (rank.status.ok()) rank.status = rank.run();
      if (!rank.status.ok() && shared.job != nullptr) shared.job->abort(rank.status);
    });
  for (std::thread& thread : threads) thread.join();

  std::vector<std::vector<float>> groups;
  for (size_t r = 0; r < ranks.size(); ++r) {
    FP4MOE_RETURN_IF_ERROR(ranks[r]->status);
    if (static_cast<int>(r) % layout.attention_tp() == 0)
      groups.push_back(std::move(ranks[r]->logits));
    else if (!run.first_rank_only && ranks[r]->logits != groups.back())
      return internal_error("rank " + std::to_string(r) + " has other logits than the first of its group");
  }
  return groups;
}

}  // namespace fp4moe
