// AdaptiveDrafter: lets a drafter draft only as far as it pays (--speculative-adaptive).
#pragma once

#include <memory>
#include <vector>

#include "engine/step/draft_choice.h"
#include "engine/step/drafter.h"
#include "io/config/model_config.h"

namespace fp4moe {

// weight_bytes: of the whole model.
StepCost step_cost(const ModelConfig& config, int64_t weight_bytes);

class AdaptiveDrafter final : public Drafter {
 public:
  AdaptiveDrafter(std::unique_ptr<Drafter> drafter, int64_t max_drafts, const StepCost& cost)
      : drafter_(std::move(drafter)), max_drafts_(max_drafts), choice_(cost) {}

  Status draft(DpScheduler& scheduler) override;
  void keep_step(const DpScheduler& scheduler) override;
  Status run_ahead(int64_t num_sampled) override { return drafter_->run_ahead(num_sampled); }
  void finish_step(double seconds) override;
  void end(const Sequence& sequence) override { drafter_->end(sequence); }
  bool runs_model() const override { return drafter_->runs_model(); }

 private:
  void list(const DpScheduler& scheduler);
  void choose(bool is_drafted);

  const std::unique_ptr<Drafter> drafter_;
  const int64_t max_drafts_;
  DraftChoice choice_;
  std::vector<Sequence*> listed_;  // those that decode in the next step
  std::vector<DraftChoice::Candidate> candidates_;
  double draft_seconds_ = 0;     // mean of drafting one position by a model
  double drafting_seconds_ = 0;  // of the last draft()
  int64_t num_unmeasured_ = 0;   // calls since the last one that waited for the drafts
  // Of the step in progress; 0: it does not only decode.
  int64_t num_sequences_ = 0, num_rows_ = 0;
};

}  // namespace fp4moe
