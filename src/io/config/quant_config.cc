#include "io/config/quant_config.h"

#include <string>
#include <vector>

#include "base/check.h"
#include "formats/fp8_matrix.h"
#include "io/json_fields.h"
#include "io/tokenizer/split_pattern.h"

namespace fp4moe {
namespace {

constexpr const char* kSupported =
    "; supported: quant_method 'mxfp4' (gpt-oss), 'modelopt' with quant_algo 'NVFP4', 'W4A16_NVFP4' or "
    "'MIXED_PRECISION', 'compressed-tensors' with format 'nvfp4-pack-quantized' or 'mxfp4-pack-quantized', "
    "'quark' with fp4 weights in groups of 32, and 'fp8' with FP4 experts (expert_dtype 'fp4')";
constexpr JsonFields::IntRange kGroupSizes = {1, 1 << 20};

Status unsupported_declaration(const std::string& what) { return unsupported(what + kSupported); }

bool is_modelopt_nvfp4(const std::string& algorithm) {
  return algorithm == "NVFP4" || algorithm == "W4A16_NVFP4";
}

bool is_modelopt_fp8(const std::string& algorithm) {
  return algorithm == "FP8" || algorithm == "FP8_PB_WO" || algorithm == "FP8_PER_CHANNEL_PER_TOKEN";
}

// Appends the patterns under `key` and checks that the regular expressions among them compile.
template <class Patterns>
void append_patterns(JsonFields& fields, const char* key, Patterns& patterns) {
  std::vector<std::string> more;
  fields.read_strings(key, more);
  for (const std::string& pattern : more) {
    if (pattern.starts_with("re:"))
      if (const Result<SplitPattern> regex = SplitPattern::compile(pattern.substr(3)); !regex.ok())
        fields.fail(regex.status().with_context(fields.where() + ": " + key));
    patterns.push_back(pattern);
  }
}

void require_group_size(JsonFields& fields, int64_t size, const QuantConfig& quant) {
  fields.require(size == 0 || size == quant.group_size,
                 "group_size = " + std::to_string(size) + "; legal for " +
                     (is_mxfp4(quant.method) ? "MXFP4: " : "NVFP4: ") + std::to_string(quant.group_size));
}

// Reads kv_cache_quant_algo "FP8", kv_cache_scheme "FP8" or kv_cache_scheme {"type": "float", "num_bits": 8}.
void read_kv_cache(JsonFields& fields, const Json& object, QuantConfig& quant) {
  std::string declared;
  if (const auto at = object.find("kv_cache_scheme"); at != object.end() && at->is_object()) {
    JsonFields scheme(*at, fields.where() + ": kv_cache_scheme");
    std::string type = "float";
    int64_t num_bits = 0;
    scheme.read_string("type", type);
    scheme.read_int("num_bits", num_bits, {1, 64});
    fields.fail(scheme.status());
    declared = (type == "float" ? "FP" : type) + std::to_string(num_bits);
  } else {
    fields.read_string("kv_cache_scheme", declared);
  }
  fields.read_string("kv_cache_quant_algo", declared);
  quant.kv_cache_type = declared;
}

// ---- compressed-tensors, and ModelOpt's config_groups, which have the same form

struct WeightGroup {
  std::vector<std::string> targets;
  std::string format;  // empty: the declaration's format
  int64_t num_bits = 4, group_size = 0;
  std::string type = "float";
};

WeightGroup read_group(JsonFields& fields, const std::string& name, const Json& object) {
  WeightGroup group;
  JsonFields group_fields(object, fields.where() + ".config_groups." + name);
  append_patterns(group_fields, "targets", group.targets);
  group_fields.read_string("format", group.format);
  if (const Json* weights = group_fields.object("weights")) {
    JsonFields weight_fields(*weights, group_fields.where() + ".weights");
    weight_fields.read_int("num_bits", group.num_bits, {1, 64});
    weight_fields.read_int("group_size", group.group_size, kGroupSizes);
    weight_fields.read_string("type", group.type);
    group_fields.fail(weight_fields.status());
  }
  fields.fail(group_fields.status());
  return group;
}

std::vector<WeightGroup> read_groups(JsonFields& fields) {
  std::vector<WeightGroup> groups;
  const Json* objects = fields.object("config_groups");
  if (objects == nullptr) return groups;
  for (const auto& [name, object] : objects->items()) groups.push_back(read_group(fields, name, object));
  return groups;
}

// Adds the modules of a non-FP4 group.
void add_other_modules(const WeightGroup& group, QuantConfig& quant) {
  for (const std::string& target : group.targets)
    if (group.num_bits == 8 && group.type == "float")
      quant.fp8_modules.push_back(target);
    else
      quant.other_modules.push_back({target, std::to_string(group.num_bits) + "-bit " + group.type});
}

QuantMethod method_of_format(const std::string& format) {
  if (format == "nvfp4-pack-quantized") return QuantMethod::kCompressedNvfp4;
  if (format == "mxfp4-pack-quantized") return QuantMethod::kCompressedMxfp4;
  return QuantMethod::kNone;
}

Result<QuantConfig> parse_compressed(const Json& object, const std::string& where) {
  JsonFields fields(object, where);
  QuantConfig quant;
  quant.declared_by = where;
  std::string format;
  fields.read_string("format", format);
  fields.require_key("config_groups");
  append_patterns(fields, "ignore", quant.exclude_modules);
  read_kv_cache(fields, object, quant);
  bool all_linears = false;
  for (const WeightGroup& group : read_groups(fields)) {
    const QuantMethod method = method_of_format(group.format.empty() ? format : group.format);
    if (method == QuantMethod::kNone || group.num_bits != 4 || group.type != "float") {
      add_other_modules(group, quant);
      continue;
    }
    if (quant.method != QuantMethod::kNone && quant.method != method)
      fields.fail(unsupported(where + ": config_groups mix NVFP4 and MXFP4; supported: one of them"));
    quant.method = method;
    quant.group_size = is_mxfp4(method) ? 32 : 16;
    require_group_size(fields, group.group_size, quant);
    for (const std::string& target : group.targets) {
      all_linears = all_linears || target == "Linear";
      quant.include_modules.push_back(target);
    }
  }
  FP4MOE_RETURN_IF_ERROR(fields.status());
  if (quant.method == QuantMethod::kNone)
    return unsupported_declaration(
        where + ": compressed-tensors format '" + format + "'" +
        (quant.other_modules.empty() ? "" : " with " + quant.other_modules[0].algorithm + " weights"));
  if (all_linears) quant.include_modules.clear();
  return quant;
}

// ---- ModelOpt

// Reads quantized_layers {module: {quant_algo, group_size}}: FP4 modules and modules in other formats.
void read_quantized_layers(JsonFields& fields, const Json& layers, QuantConfig& quant) {
  for (const auto& [module, object] : layers.items()) {
    JsonFields layer(object, fields.where() + ": quantized_layers." + module);
    std::string algorithm;
    int64_t group_size = 0;
    layer.require_key("quant_algo");
    layer.read_string("quant_algo", algorithm);
    layer.read_int("group_size", group_size, kGroupSizes);
    if (is_modelopt_nvfp4(algorithm)) {
      require_group_size(layer, group_size, quant);
      quant.include_modules.push_back(module);
    } else if (is_modelopt_fp8(algorithm)) {
      quant.fp8_modules.push_back(module);
    } else {
      quant.other_modules.push_back({module, algorithm});
    }
    fields.fail(layer.status());
  }
}

// MIXED_PRECISION declares its FP4 modules in one of three ways.
Status read_mixed(JsonFields& fields, const std::vector<WeightGroup>& groups, QuantConfig& quant) {
  std::string experts_algorithm;
  fields.read_string("moe_quant_algo", experts_algorithm);
  if (const Json* layers = fields.object("quantized_layers"))
    read_quantized_layers(fields, *layers, quant);
  else if (is_modelopt_nvfp4(experts_algorithm))
    quant.include_modules = {"*.mlp.experts", "*.ffn.experts"};
  else
    for (const WeightGroup& group : groups)
      if (group.num_bits == 4) quant.include_modules.append(group.targets);
  FP4MOE_RETURN_IF_ERROR(fields.status());
  if (quant.include_modules.empty())
    return unsupported_declaration(fields.where() +
                                   ": MIXED_PRECISION without NVFP4 in quantized_layers or moe_quant_algo");
  return {};
}

Result<QuantConfig> parse_modelopt(const Json& object, const std::string& where) {
  JsonFields fields(object, where);
  QuantConfig quant;
  quant.method = QuantMethod::kModelOptNvfp4;
  quant.group_size = 16;
  quant.declared_by = where;
  std::string algorithm;
  int64_t group_size = 0;
  fields.read_string("quant_algo", algorithm);
  fields.require_key("quant_algo");
  fields.read_int("group_size", group_size, kGroupSizes);
  append_patterns(fields, "exclude_modules", quant.exclude_modules);
  append_patterns(fields, "ignore", quant.exclude_modules);
  read_kv_cache(fields, object, quant);
  const bool is_mixed = algorithm == "MIXED_PRECISION";
  FP4MOE_RETURN_IF_ERROR(fields.status());
  if (!is_mixed && !is_modelopt_nvfp4(algorithm))
    return unsupported_declaration(where + ": quant_algo '" + algorithm + "'");
  require_group_size(fields, group_size, quant);
  const std::vector<WeightGroup> groups = read_groups(fields);
  for (const WeightGroup& group : groups) {
    if (group.num_bits == 4)
      require_group_size(fields, group.group_size, quant);
    else
      add_other_modules(group, quant);
  }
  if (is_mixed) FP4MOE_RETURN_IF_ERROR(read_mixed(fields, groups, quant));
  FP4MOE_RETURN_IF_ERROR(fields.status());
  return quant;
}

// ---- AMD Quark

// Reads a weight's specification: an object, or null for modules that are not quantised.
struct QuarkWeight {
  std::string dtype;  // empty: not quantised
  bool is_mxfp4 = false;
};

QuarkWeight read_quark_weight(JsonFields& fields, const Json& object, const std::string& where) {
  QuarkWeight weight;
  JsonFields spec_fields(object, where);
  const auto at = object.find("weight");
  if (at == object.end() || at->is_null()) return weight;
  if (at->is_array()) {  // two stages, such as NVFP4's
    weight.dtype = "two-stage " + at->dump();
    return weight;
  }
  const Json* spec = spec_fields.object("weight");
  fields.fail(spec_fields.status());
  if (spec == nullptr) return weight;
  JsonFields weight_fields(*spec, where + ".weight");
  int64_t group_size = 0;
  std::string scheme, scale_format = "e8m0";
  weight_fields.require_key("dtype");
  weight_fields.read_string("dtype", weight.dtype);
  weight_fields.read_string("qscheme", scheme);
  weight_fields.read_string("scale_format", scale_format);
  weight_fields.read_int("group_size", group_size, {-1, 1 << 20});  // -1: whole rows
  weight.is_mxfp4 = (weight.dtype == "fp4" || weight.dtype == "fp4_e2m1") && scheme == "per_group" &&
                    scale_format == "e8m0" && group_size == 32;
  fields.fail(weight_fields.status());
  return weight;
}

// Adds the modules of one specification to the list of their format.
void add_quark_modules(const std::string& pattern, const QuarkWeight& weight, QuantConfig& quant) {
  if (weight.dtype.empty())
    quant.exclude_modules.push_back(pattern);
  else if (weight.is_mxfp4)
    quant.include_modules.push_back(pattern);
  else if (weight.dtype == "fp8_e4m3")
    quant.fp8_modules.push_back(pattern);
  else
    quant.other_modules.push_back({pattern, weight.dtype});
}

Result<QuantConfig> parse_quark(const Json& object, const std::string& where) {
  JsonFields fields(object, where);
  QuantConfig quant;
  quant.method = QuantMethod::kQuarkMxfp4;
  quant.group_size = 32;
  quant.declared_by = where;
  append_patterns(fields, "exclude", quant.exclude_modules);
  if (const Json* layers = fields.object("layer_quant_config"))
    for (const auto& [pattern, layer] : layers->items()) {
      fields.require(layer.is_object(), "layer_quant_config." + pattern + " is not an object");
      if (layer.is_object())
        add_quark_modules(pattern,
                          read_quark_weight(fields, layer, where + ": layer_quant_config." + pattern), quant);
    }
  QuarkWeight all;
  if (const Json* global = fields.object("global_quant_config"))
    all = read_quark_weight(fields, *global, where + ": global_quant_config");
  FP4MOE_RETURN_IF_ERROR(fields.status());
  if (all.is_mxfp4) {
    quant.include_modules.clear();
  } else if (quant.include_modules.empty()) {
    return unsupported_declaration(where + ": quark weights of dtype '" + all.dtype + "'");
  } else if (!all.dtype.empty()) {
    add_quark_modules("Linear", all, quant);
  }
  return quant;
}

// ---- fp8: DeepSeek's blocks in dense layers, and FP4 experts

Result<QuantConfig> parse_fp8(const Json& object, const Json& config, const std::string& where) {
  JsonFields fields(object, where), config_fields(config, "config.json");
  std::string fmt = "e4m3", expert_dtype = "fp8";
  std::vector<int64_t> block = {kFp8WeightBlock, kFp8WeightBlock};
  fields.read_string("fmt", fmt);
  fields.read_ints("weight_block_size", block, {1, 1 << 20});
  config_fields.read_string("expert_dtype", expert_dtype);
  fields.read_string("expert_dtype", expert_dtype);
  fields.fail(config_fields.status());
  FP4MOE_RETURN_IF_ERROR(fields.status());
  if (fmt != "e4m3") return unsupported_declaration(where + ": fmt '" + fmt + "' of FP8 weights");
  if (block != std::vector<int64_t>{kFp8WeightBlock, kFp8WeightBlock})
    return unsupported(where + ": weight_block_size is not [128, 128], the only supported size");
  // ModelOpt's keys beside quant_method fp8: its experts are NVFP4.
  if (fields.has("quant_algo")) {
    FP4MOE_ASSIGN_OR_RETURN(QuantConfig quant, parse_modelopt(object, where));
    quant.fp8_modules.push_back("Linear");
    return quant;
  }
  if (expert_dtype != "fp4")
    return unsupported_declaration(where + ": quant_method 'fp8' with routed experts in '" + expert_dtype +
                                   "'");
  QuantConfig quant;
  quant.method = QuantMethod::kFp8Mxfp4;
  quant.group_size = 32;
  quant.declared_by = where;
  quant.include_modules = {"*.experts"};
  quant.fp8_modules = {"Linear"};
  append_patterns(fields, "modules_to_not_convert", quant.exclude_modules);
  read_kv_cache(fields, object, quant);
  FP4MOE_RETURN_IF_ERROR(fields.status());
  return quant;
}

// ---- the two locations

// Parses config.json's quantization_config.
Result<QuantConfig> parse_flat(const Json& object, const Json& config) {
  const std::string where = "config.json: quantization_config";
  JsonFields fields(object, where);
  std::string method = "modelopt";  // only ModelOpt has quant_algo without quant_method
  fields.read_string("quant_method", method);
  fields.require(fields.has("quant_method") || fields.has("quant_algo"), "quant_method is missing");
  FP4MOE_RETURN_IF_ERROR(fields.status());
  if (method == "compressed-tensors") return parse_compressed(object, where);
  if (method == "modelopt" || method == "modelopt_fp4" || method == "modelopt_mixed")
    return parse_modelopt(object, where);
  if (method == "quark") return parse_quark(object, where);
  if (method == "fp8") return parse_fp8(object, config, where);
  if (method != "mxfp4") return unsupported_declaration(where + ": quant_method '" + method + "'");
  QuantConfig quant;
  quant.method = QuantMethod::kMxfp4GptOss;
  quant.group_size = 32;
  quant.declared_by = where;
  append_patterns(fields, "modules_to_not_convert", quant.exclude_modules);
  read_kv_cache(fields, object, quant);
  FP4MOE_RETURN_IF_ERROR(fields.status());
  return quant;
}

Result<QuantConfig> parse_hf_quant(const Json& object) {
  JsonFields fields(object, "hf_quant_config.json");
  fields.require_key("quantization");
  const Json* quantization = fields.object("quantization");
  FP4MOE_RETURN_IF_ERROR(fields.status());
  return parse_modelopt(*quantization, "hf_quant_config.json: quantization");
}

}  // namespace

Result<QuantConfig> parse_quant_config(const Json& config, const Json& hf_quant) {
  JsonFields fields(config, "config.json");
  const Json* flat = fields.object("quantization_config");
  FP4MOE_RETURN_IF_ERROR(fields.status());
  if (flat == nullptr && hf_quant.is_null()) return QuantConfig{};
  if (flat == nullptr) return parse_hf_quant(hf_quant);
  FP4MOE_ASSIGN_OR_RETURN(QuantConfig quant, parse_flat(*flat, config));
  if (hf_quant.is_null()) return quant;
  FP4MOE_ASSIGN_OR_RETURN(const QuantConfig other, parse_hf_quant(hf_quant));
  if (other.method != quant.method)
    return invalid_argument(quant.declared_by + " and " + other.declared_by + " declare different methods");
  return quant;
}

}  // namespace fp4moe
