#include <optional>

#include "io/model_families.h"

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
    if (number > 0) value = number;  // 0 stands for none
  };
  read_optional("attention_factor", rope.attention_factor);
  read_optional("mscale", rope.mscale);
  read_optional("mscale_all_dim", rope.mscale_all_dim);
  scaling.require(rope.beta_fast >= rope.beta_slow, "beta_fast is below beta_slow");
}

}  // namespace

void read_rope(JsonFields& fields, ModelConfig& config) {
  const char* key = fields.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  constexpr JsonFields::RealRange kThetas = {1, 1e12};
  fields.read_real("rope_theta", config.rope.theta, kThetas);
  const Json* object = fields.object(key);
  if (object == nullptr) return;
  JsonFields scaling(*object, fields.where() + ": " + key);
  for (const auto& [name, value] : object->items())
    if (value.is_object())
      scaling.fail(
          unsupported(scaling.where() + " differs by layer type ('" + name + "'); supported: one for all"));
  std::string type = "default";
  scaling.read_string("type", type);
  scaling.read_string("rope_type", type);
  scaling.read_real("rope_theta", config.rope.theta, kThetas);
  if (type == "yarn")
    read_yarn(scaling, config);
  else if (type != "default" && scaling.status().ok())
    scaling.fail(unsupported(scaling.where() + ": rope_type '" + type + "'; supported: default, yarn"));
  fields.fail(scaling.status());
}

}  // namespace fp4moe
