#include "engine/rank_group.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/cpu_info.h"
#include "model/kv_cache.h"

namespace fp4moe {
namespace {

// One rank without a fabric: a step is a call.
class SingleRank final : public RankGroup {
 public:
  explicit SingleRank(int num_threads) : pool_(num_threads) {}

  Status load(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan,
              const EngineConfig& flags, const RankGroupOptions& options) {
    const ModelOptions model_options{
        .act_dtype = plan.act_dtype,
        .isa = plan.isa,
        .moe_plan = plan.moe,
        .max_batch_tokens = options.max_batch_tokens,
        .max_logit_rows = options.max_logit_rows,
    };
    FP4MOE_ASSIGN_OR_RETURN(model_,
                            Model::load(checkpoint, config, model_options, pool_, flags.progress_sink));
    FP4MOE_ASSIGN_OR_RETURN(kv_,
                            KvCache::make(config, plan.act_dtype, options.num_kv_pages, flags.page_size));
    FP4MOE_ASSIGN_OR_RETURN(
        logits_, Buffer::make(options.max_logit_rows * config.vocab_size * int64_t{sizeof(float)}));
    return {};
  }

  const ModelConfig& config() const override { return model_->config(); }
  int num_groups() const override { return 1; }
  int64_t num_kv_pages() const override { return kv_.num_pages(); }
  int page_size() const override { return kv_.page_size(); }
  Status forward(std::span<const Batch> groups) override {
    FP4MOE_CHECK(groups.size() == 1, std::to_string(groups.size()) + " groups, 1 rank");
    return model_->forward(groups[0], kv_, logits(), pool_);
  }
  float* logits() override { return logits_.as<float>(); }
  Status failure() const override { return {}; }
  ThreadPool& pool() override { return pool_; }

  Status follow() override { return internal_error("one rank has nobody to follow"); }
  const Job* job() const override { return nullptr; }
  int64_t weight_bytes() const override { return model_->weight_bytes(); }
  int64_t kv_bytes() const override { return kv_.num_bytes(); }
  int64_t comm_bytes() const override { return 0; }

 private:
  ThreadPool pool_;
  std::unique_ptr<Model> model_;
  KvCache kv_;
  Buffer logits_;  // [max_logit_rows, V] f32
};

}  // namespace

Result<std::unique_ptr<RankGroup>> RankGroup::make(const Checkpoint& checkpoint, const ModelConfig& config,
                                                   const ModelPlan& plan, const EngineConfig& flags,
                                                   const RankGroupOptions& options) {
  const int num_threads = flags.threads > 0 ? flags.threads : available_cores();
  auto single = std::make_unique<SingleRank>(num_threads);
  FP4MOE_RETURN_IF_ERROR(single->load(checkpoint, config, plan, flags, options));
  return std::unique_ptr<RankGroup>(std::move(single));
}

}  // namespace fp4moe
