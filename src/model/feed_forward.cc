#include "model/feed_forward.h"

#include <algorithm>

#include "base/check.h"
#include "base/weight_store.h"
#include "io/checkpoint/expert_weights.h"
#include "io/checkpoint/finite_check.h"
#include "model/decoder.h"
#include "model/weight_loader.h"
#include "moe/local_experts.h"
#include "moe/shared_expert.h"

namespace fp4moe {
namespace {

Result<RouterWeights> load_router(WeightLoader& loader, const std::string& prefix, const MoeNames& names) {
  const ModelConfig& config = loader.config();
  const std::string router = prefix + names.router;
  FP4MOE_ASSIGN_OR_RETURN(
      const TensorView weight,
      loader.checkpoint().get(router + ".weight", DType::kBF16, {config.num_experts, config.hidden_size}));
  FP4MOE_RETURN_IF_ERROR(check_finite({loader.checkpoint().find(router + ".weight")}, loader.pool()));
  RouterWeights weights{.scoring = names.scoring,
                        .weight = weight.as<bf16>(),
                        .num_groups = config.router.num_groups,
                        .top_k_groups = config.router.top_k_groups,
                        .norm_top_k = config.router.norm_top_k,
                        .scaling_factor = static_cast<float>(config.router.scaling_factor)};
  if (names.router_bias != nullptr) {
    FP4MOE_ASSIGN_OR_RETURN(weights.bias, loader.vector(prefix + names.router_bias, config.num_experts));
  }
  if (config.router.has_correction_bias) {
    FP4MOE_ASSIGN_OR_RETURN(weights.correction_bias,
                            loader.vector(router + ".e_score_correction_bias", config.num_experts));
  }
  return weights;
}

// The experts whose scales this rank reads and whose values it checks: with a placement, the smallest range
// with all of its experts.
ExpertRange experts_to_read(const WeightLoader& loader, const ExpertPlacement* placement) {
  const Shard local = loader.moe_plan().problem().local_experts();
  if (placement == nullptr) return {local.first, local.count};
  const auto mine =
      placement->logical_of().subspan(static_cast<size_t>(local.first), static_cast<size_t>(local.count));
  const auto [first, last] = std::ranges::minmax(mine);
  return {first, last - first + 1};
}

// Makes the layer with its experts where the placement, if there is one, has them.
Result<std::unique_ptr<MoeLayer>> make_placed_layer(WeightLoader& loader, const RouterWeights& router,
                                                    const MoeWeightsView& experts,
                                                    const SharedExpertWeights* shared,
                                                    const ExpertPlacement* placement) {
  const MoePlan& plan = loader.moe_plan();
  if (placement == nullptr) return MoeLayer::make(plan, loader.ops(), router, experts, shared, loader.pool());
  FP4MOE_ASSIGN_OR_RETURN(std::unique_ptr<MoeLayer> layer,
                          MoeLayer::make(plan, loader.ops(), router, physical_experts(experts, *placement),
                                         shared, loader.pool()));
  FP4MOE_RETURN_IF_ERROR(layer->placed_experts()->set_placement(*placement));
  return layer;
}

}  // namespace

Result<std::unique_ptr<MoeLayer>> load_moe(WeightLoader& loader, int64_t layer, const MoeNames& names) {
  const ModelConfig& config = loader.config();
  const std::string prefix = layer_prefix(layer);
  FP4MOE_ASSIGN_OR_RETURN(const RouterWeights router, load_router(loader, prefix, names));
  const ExpertPlacement* const placement = loader.placement(layer);
  const ExpertRange local = experts_to_read(loader, placement);
  const bool packs = packs_weights();  // if not, scales and matrices were checked when they were packed
  const bool is_fp4 = loader.moe_plan().problem().format != Fp4Format::kNone;
  FP4MOE_ASSIGN_OR_RETURN(const MoeWeightsView experts,
                          is_fp4 ? load_expert_weights(loader.checkpoint(), config, layer,
                                                       {local.first, packs ? local.count : 0}, &loader.pool())
                                 : load_unquantised_experts(loader.checkpoint(), config, layer));
  FP4MOE_RETURN_IF_ERROR(
      check_experts_finite(loader.checkpoint(), config, layer, local, packs, loader.pool()));
  const bool has_shared = names.shared_expert != nullptr && config.shared_intermediate_size > 0;
  SharedExpertWeights shared;
  if (has_shared) {
    FP4MOE_ASSIGN_OR_RETURN(shared.mlp,
                            load_mlp_weights(loader.checkpoint(), config, prefix + names.shared_expert,
                                             config.shared_intermediate_size));
    FP4MOE_RETURN_IF_ERROR(loader.check_mlp(shared.mlp, shared_expert_shard(loader.moe_plan(), shared.mlp)));
  }
  if (has_shared && names.shared_gate != nullptr) {
    FP4MOE_ASSIGN_OR_RETURN(
        const TensorView gate,
        loader.checkpoint().get(prefix + names.shared_gate, DType::kBF16, {1, config.hidden_size}));
    FP4MOE_RETURN_IF_ERROR(
        check_finite({loader.checkpoint().find(prefix + names.shared_gate)}, loader.pool()));
    shared.gate = gate.as<bf16>();
  }
  return make_placed_layer(loader, router, experts, has_shared ? &shared : nullptr, placement);
}

Result<std::unique_ptr<DenseMlp>> load_dense_mlp(WeightLoader& loader, int64_t layer) {
  const int64_t total = loader.config().dense_intermediate_size;
  const RankLayout& layout = loader.layout();
  const std::string name = layer_prefix(layer) + "mlp";
  FP4MOE_ASSIGN_OR_RETURN(const MlpWeightsView weights,
                          load_mlp_weights(loader.checkpoint(), loader.config(), name, total));
  const Shard shard =
      loader.is_deterministic()
          ? Shard{0, total}
          : shard_blocks(total, dense_mlp_block(weights), layout.attention_tp(), layout.attention_rank());
  FP4MOE_RETURN_IF_ERROR(loader.check_mlp(weights, shard));
  auto mlp = DenseMlp::make(loader.moe_plan(), loader.ops(), weights, shard, loader.pool());
  if (!mlp.ok()) return mlp.status().with_context(name);
  return mlp;
}

}  // namespace fp4moe
