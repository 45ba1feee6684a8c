#include <optional>

#include "io/config/model_families.h"

namespace fp4moe {
namespace {

void read_yarn(JsonFields& scaling, ModelConfig& config) {
  RopeConfig& rope = config.rope;
  rope.type = RopeConfig::Type::kYarn;
  scaling.require_key("factor");
  scaling.read_real("factor", rope.factor, {1, kHuge});
  scaling.read_real("beta_fast", rope.beta_fast, {1e-6, kHuge});
  scaling.read_real("beta_slow", rope.beta_slow, {1e-6, kHuge});
  rope.original_max_position_embeddings = static_cast<double>(config.max_position_embeddings);
  scaling.read_real("original_max_position_embeddings", rope.original_max_position_embeddings, {1, kHuge});
  scaling.read_bool("truncate", rope.truncate);
  const auto read_optional = [&](const char* key, std::optional<double>& value) {
    double number = 0;
    scaling.read_real(key, number, {0, kHuge});
    if (number > 0) value = number;  // 0: not given
  };
  read_optional("attention_factor", rope.attention_factor);
  read_optional("mscale", rope.mscale);
  read_optional("mscale_all_dim", rope.mscale_all_dim);
  scaling.require(rope.beta_fast >= rope.beta_slow, "beta_fast is below beta_slow");
}

// Returns the stock gpt-oss class's default, which applies if rope_parameters is absent or null.
RopeConfig stock_gpt_oss_rope(double theta) {
  return {.type = RopeConfig::Type::kYarn,
          .theta = theta,
          .factor = 32,
          .beta_fast = 32,
          .beta_slow = 1,
          .original_max_position_embeddings = 4096,
          .truncate = false,
          .attention_factor = {},
          .mscale = {},
          .mscale_all_dim = {}};
}

// Files for both transformers generations have both objects, which must agree, except that only one of them
// has rope_theta.
void check_both_spellings(JsonFields& fields) {
  const Json *newer = fields.object("rope_parameters"), *older = fields.object("rope_scaling");
  if (newer == nullptr || older == nullptr) return;
  Json objects[] = {*newer, *older};
  for (Json& object : objects) {
    object.erase("rope_theta");
    if (object.contains("type") && !object.contains("rope_type")) object["rope_type"] = object["type"];
    object.erase("type");
  }
  fields.require(objects[0] == objects[1],
                 "rope_parameters and rope_scaling differ; legal: one of them, or both with equal values");
}

// Reads the fraction of a head that RoPE rotates. Refuses fractions for families whose stock class rotates
// whole heads.
void read_partial_rotary(JsonFields& fields, const StockDefaults& stock, double& factor) {
  fields.read_real("partial_rotary_factor", factor, {0, 1});
  if (factor != 1 && stock.partial_rotary_factor == 0)
    fields.fail(
        unsupported(fields.where() + ": partial_rotary_factor = " + Json(factor).dump() + "; supported: 1"));
}

void set_rotary_dim(JsonFields& fields, double factor, ModelConfig& config) {
  const int64_t whole = config.mla.kv_lora_rank > 0 ? config.mla.qk_rope_head_dim : config.head_dim;
  config.rotary_dim = static_cast<int64_t>(static_cast<double>(whole) * factor);
  fields.require(config.rotary_dim >= 2 && config.rotary_dim % 2 == 0,
                 "partial_rotary_factor = " + Json(factor).dump() + " of " + equals("head_dim", whole) +
                     " rotates " + std::to_string(config.rotary_dim) + " dims; legal: even numbers from 2");
}

}  // namespace

void read_rope(JsonFields& fields, const StockDefaults& stock, ModelConfig& config) {
  if (!fields.status().ok()) return;
  const char* key = fields.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  constexpr JsonFields::RealRange kThetas = {1, 1e12};
  fields.read_real("rope_theta", config.rope.theta, kThetas);
  check_both_spellings(fields);
  double factor = stock.partial_rotary_factor == 0 ? 1 : stock.partial_rotary_factor;
  read_partial_rotary(fields, stock, factor);
  const Json* object = fields.object(key);
  if (object == nullptr) {
    if (config.family == ModelFamily::kGptOss) config.rope = stock_gpt_oss_rope(config.rope.theta);
    set_rotary_dim(fields, factor, config);
    return;
  }
  JsonFields scaling(*object, fields.where() + ": " + key);
  for (const auto& [name, value] : object->items())
    if (value.is_object())
      scaling.fail(unsupported(scaling.where() + " differs by layer type ('" + name +
                               "'); supported: the same for all layers"));
  read_partial_rotary(scaling, stock, factor);
  std::string type = "default";
  scaling.read_string("type", type);
  scaling.read_string("rope_type", type);
  scaling.read_real("rope_theta", config.rope.theta, kThetas);
  if (type == "yarn")
    read_yarn(scaling, config);
  else if (type != "default" && scaling.status().ok())
    scaling.fail(unsupported(scaling.where() + ": rope_type '" + type + "'; supported: default, yarn"));
  fields.fail(scaling.status());
  if (fields.status().ok()) set_rotary_dim(fields, factor, config);
}

}  // namespace fp4moe
