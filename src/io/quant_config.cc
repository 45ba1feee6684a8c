#include "io/quant_config.h"

#include <string>

#include "base/check.h"
#include "io/json_fields.h"

namespace fp4moe {
namespace {

constexpr const char* kSupported =
    "; supported are quant_method 'mxfp4' (gpt-oss) and 'modelopt' with quant_algo 'NVFP4' or 'W4A16_NVFP4'";

Status unsupported_declaration(const std::string& what) { return unsupported(what + kSupported); }

// Group sizes of config_groups.*.weights must all be `group_size`, if that was given.
void read_config_groups(JsonFields& fields, int64_t& group_size) {
  const Json* groups = fields.object("config_groups");
  if (groups == nullptr) return;
  for (const auto& [name, group] : groups->items()) {
    JsonFields group_fields(group, fields.where() + ".config_groups." + name);
    const Json* weights = group_fields.object("weights");
    int64_t size = group_size;
    if (weights != nullptr) {
      JsonFields weight_fields(*weights, group_fields.where() + ".weights");
      weight_fields.read_int("group_size", size, {1, 1 << 20});
      fields.fail(weight_fields.status());
    }
    fields.fail(group_fields.status());
    fields.require(group_size == 0 || size == group_size, "group sizes " + std::to_string(group_size) +
                                                              " and " + std::to_string(size) + " contradict");
    group_size = size;
  }
}

// The NVFP4 declaration of ModelOpt; `exclude_key` is how this place spells the modules left alone.
Result<QuantConfig> parse_modelopt(const Json& object, const std::string& where, const char* exclude_key) {
  JsonFields fields(object, where);
  QuantConfig quant{
      .method = QuantMethod::kModelOptNvfp4, .group_size = 16, .declared_by = where, .exclude_modules = {}};
  std::string algorithm;
  int64_t group_size = 0;
  fields.read_string("quant_algo", algorithm);
  fields.read_int("group_size", group_size, {1, 1 << 20});
  read_config_groups(fields, group_size);
  fields.read_strings(exclude_key, quant.exclude_modules);
  fields.require_key("quant_algo");
  FP4MOE_RETURN_IF_ERROR(fields.status());
  if (algorithm != "NVFP4" && algorithm != "W4A16_NVFP4")
    return unsupported_declaration(where + ": quant_algo '" + algorithm + "'");
  fields.require(group_size == 0 || group_size == quant.group_size,
                 "group_size = " + std::to_string(group_size) + "; legal for NVFP4: 16");
  FP4MOE_RETURN_IF_ERROR(fields.status());
  return quant;
}

// config.json's quantization_config.
Result<QuantConfig> parse_flat(const Json& object) {
  const std::string where = "config.json: quantization_config";
  JsonFields fields(object, where);
  std::string method;
  fields.read_string("quant_method", method);
  fields.require_key("quant_method");
  QuantConfig quant{
      .method = QuantMethod::kMxfp4GptOss, .group_size = 32, .declared_by = where, .exclude_modules = {}};
  fields.read_strings("modules_to_not_convert", quant.exclude_modules);
  FP4MOE_RETURN_IF_ERROR(fields.status());
  if (method == "mxfp4") return quant;
  if (method == "modelopt" || method == "modelopt_fp4") return parse_modelopt(object, where, "ignore");
  return unsupported_declaration(where + ": quant_method '" + method + "'");
}

Result<QuantConfig> parse_hf_quant(const Json& object) {
  JsonFields fields(object, "hf_quant_config.json");
  fields.require_key("quantization");
  const Json* quantization = fields.object("quantization");
  FP4MOE_RETURN_IF_ERROR(fields.status());
  return parse_modelopt(*quantization, "hf_quant_config.json: quantization", "exclude_modules");
}

}  // namespace

Result<QuantConfig> parse_quant_config(const Json& config, const Json& hf_quant) {
  JsonFields fields(config, "config.json");
  const Json* flat = fields.object("quantization_config");
  FP4MOE_RETURN_IF_ERROR(fields.status());
  if (flat == nullptr && hf_quant.is_null()) return QuantConfig{};
  if (flat == nullptr) return parse_hf_quant(hf_quant);
  FP4MOE_ASSIGN_OR_RETURN(QuantConfig quant, parse_flat(*flat));
  if (hf_quant.is_null()) return quant;
  FP4MOE_ASSIGN_OR_RETURN(const QuantConfig other, parse_hf_quant(hf_quant));
  if (other.method != quant.method)
    return invalid_argument(quant.declared_by + " and " + other.declared_by + " declare different methods");
  return quant;
}

}  // namespace fp4moe
