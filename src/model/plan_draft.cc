#include "model/plan_draft.h"

#include <utility>

#include "model/eagle3_head.h"
#include "model/mtp_head.h"

namespace fp4moe {
namespace {

// The target's flags without its choices for experts and their exchange, and without speculative decoding.
EngineConfig flags_of_draft(const ModelPlan& target, const std::string& folder) {
  const EngineConfig defaults;
  EngineConfig flags = target.flags;
  flags.model_path = folder;
  flags.device = device_kind_name(target.device());
  flags.quantization = defaults.quantization;
  flags.moe_runner_backend = defaults.moe_runner_backend;
  flags.moe_a2a_backend = defaults.moe_a2a_backend;
  flags.fp4_compute = defaults.fp4_compute;
  flags.fp4_act_scales = defaults.fp4_act_scales;
  flags.deepep_mode = defaults.deepep_mode;
  flags.deepep_dispatcher_output_dtype = defaults.deepep_dispatcher_output_dtype;
  flags.flashinfer_dispatcher_output_dtype = defaults.flashinfer_dispatcher_output_dtype;
  flags.flashinfer_combine_dtype = defaults.flashinfer_combine_dtype;
  flags.ep_num_redundant_experts = defaults.ep_num_redundant_experts;
  flags.init_expert_location = defaults.init_expert_location;
  flags.enable_eplb = defaults.enable_eplb;
  flags.speculative_algorithm = defaults.speculative_algorithm;
  flags.speculative_draft_model_path = defaults.speculative_draft_model_path;
  flags.speculative_num_draft_tokens = defaults.speculative_num_draft_tokens;
  flags.speculative_num_steps = defaults.speculative_num_steps;
  flags.speculative_eagle_topk = defaults.speculative_eagle_topk;
  flags.speculative_adaptive = defaults.speculative_adaptive;
  return flags;
}

Status plan_standalone(const ModelPlan& target, DraftPlan& draft) {
  draft.folder = target.flags.speculative_draft_model_path;
  FP4MOE_ASSIGN_OR_RETURN(draft.config, load_model_config(draft.folder));
  if (draft.config.has_state())
    return unsupported("a draft model with recurrent layers (" + draft.config.model_type +
                       ") is not supported; nearest legal choice: --speculative-algorithm NGRAM");
  FP4MOE_ASSIGN_OR_RETURN(draft.plan,
                          plan_model(draft.config, flags_of_draft(target, draft.folder), target.absent_gpu));
  draft.num_input_ids = draft.config.vocab_size;
  draft.max_positions = draft.config.max_position_embeddings;
  return {};
}

// The experts may be in another format than those of the model's other layers.
Status plan_mtp(const ModelConfig& target, const ModelPlan& plan, DraftPlan& draft) {
  FP4MOE_RETURN_IF_ERROR(check_mtp_layer(target));
  draft.algorithm = DraftAlgorithm::kMtp;
  draft.config = mtp_config(target);
  ModelConfig planned = draft.config;
  const bool is_dummy = plan.flags.load_format == "dummy";
  FP4MOE_ASSIGN_OR_RETURN(const bool is_bf16,
                          has_bf16_mtp_experts(target, is_dummy ? std::string() : plan.flags.model_path));
  if (is_bf16) planned.quant.method = QuantMethod::kNone;
  FP4MOE_ASSIGN_OR_RETURN(draft.plan,
                          plan_model(planned, flags_of_draft(plan, plan.flags.model_path), plan.absent_gpu));
  draft.features.is_final_norm = true;
  draft.num_input_ids = target.vocab_size;
  draft.max_positions = target.max_position_embeddings;
  return {};
}

// The head runs as the target does; without experts, the target's plan for them is not used.
Status plan_eagle3(const ModelConfig& target, const ModelPlan& plan, DraftPlan& draft) {
  draft.algorithm = DraftAlgorithm::kEagle3;
  draft.folder = plan.flags.speculative_draft_model_path;
  FP4MOE_ASSIGN_OR_RETURN(const Eagle3Config head, load_eagle3_config(draft.folder, target));
  FP4MOE_RETURN_IF_ERROR(check_attention(head.layers, plan.moe.problem()));
  draft.config = head.layers;
  draft.plan = plan;
  draft.features = eagle3_features(head);
  draft.num_input_ids = target.vocab_size;
  draft.max_positions = target.max_position_embeddings;
  return {};
}

}  // namespace

Result<std::shared_ptr<const DraftPlan>> plan_draft(const ModelConfig& target, const ModelPlan& plan) {
  const std::string& algorithm = plan.flags.speculative_algorithm;
  auto draft = std::make_shared<DraftPlan>();
  if (algorithm == "EAGLE" || algorithm == "NEXTN") {
    if (const Status status = plan_mtp(target, plan, *draft); !status.ok())
      return status.with_context("--speculative-algorithm " + algorithm);
    return std::shared_ptr<const DraftPlan>(std::move(draft));
  }
  if (algorithm != "STANDALONE" && algorithm != "EAGLE3") return std::shared_ptr<const DraftPlan>();
  const Status status =
      algorithm == "EAGLE3" ? plan_eagle3(target, plan, *draft) : plan_standalone(plan, *draft);
  if (!status.ok()) return status.with_context("--speculative-draft-model-path " + draft->folder);
  return std::shared_ptr<const DraftPlan>(std::move(draft));
}

}  // namespace fp4moe
