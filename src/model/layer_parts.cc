#include "model/layer_parts.h"

#include "base/check.h"
#include "model/weight_loader.h"

namespace fp4moe {
namespace {

// Loads all parts but the attention, which `out` already has. `attention_out` is relative to the layer's
// prefix.
Result<DecoderLayer> load_rest(WeightLoader& loader, int64_t layer, const MoeNames& moe,
                               const char* attention_out, DecoderLayer out) {
  const std::vector<bool>& has_experts = loader.config().layer_has_experts;
  FP4MOE_RETURN_IF_ERROR(load_norms(loader, layer, out));
  const bool has_bias = loader.config().attention_out_bias && !loader.config().has_state(layer);
  FP4MOE_ASSIGN_OR_RETURN(out.attention_out, load_attention_out(loader, layer_prefix(layer) + attention_out,
                                                                out.attention->out_cols(), has_bias));
  if (!has_experts.empty() && !has_experts[static_cast<size_t>(layer)]) {
    FP4MOE_ASSIGN_OR_RETURN(out.mlp, load_dense_mlp(loader, layer));
    return out;
  }
  FP4MOE_ASSIGN_OR_RETURN(out.moe, load_moe(loader, layer, moe));
  return out;
}

constexpr const char* kAttentionOut = "self_attn.o_proj";

std::string attention_prefix(int64_t layer) { return layer_prefix(layer) + "self_attn."; }

}  // namespace

Result<DecoderLayer> load_gqa_layer(WeightLoader& loader, const GqaOptions& options, const MoeNames& moe) {
  DecoderLayer out;
  FP4MOE_ASSIGN_OR_RETURN(out.attention, load_gqa(loader, attention_prefix(options.layer), options));
  return load_rest(loader, options.layer, moe, kAttentionOut, std::move(out));
}

Result<DecoderLayer> load_mla_layer(WeightLoader& loader, int64_t layer, const MoeNames& moe) {
  DecoderLayer out;
  FP4MOE_ASSIGN_OR_RETURN(out.attention, load_mla(loader, attention_prefix(layer)));
  return load_rest(loader, layer, moe, kAttentionOut, std::move(out));
}

Result<DecoderLayer> load_delta_layer(WeightLoader& loader, int64_t layer, const MoeNames& moe) {
  DecoderLayer out;
  FP4MOE_ASSIGN_OR_RETURN(out.attention, load_gated_delta(loader, layer_prefix(layer) + "linear_attn."));
  return load_rest(loader, layer, moe, "linear_attn.out_proj", std::move(out));
}

}  // namespace fp4moe
