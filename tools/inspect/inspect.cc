// fp4moe inspect: prints the contents of a checkpoint as text or JSON.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "flag_checks.h"
#include "formats/bf16.h"
#include "inspect/inspect_numerics.h"
#include "io/checkpoint/module_formats.h"
#include "io/checkpoint/mtp_layers.h"
#include "io/checkpoint/unused_tensors.h"
#include "io/write/expert_statistics.h"
#include "subcommand.h"

namespace fp4moe {
namespace {

using Report = nlohmann::ordered_json;

struct InspectFlags {
  std::string folder, tensor;
  bool experts = false, numerics = false, json = false;
  int64_t layer = -1;  // for --numerics; -1: all
};

const char* quant_method_name(QuantMethod method) {
  switch (method) {
    case QuantMethod::kNone:
      return "none";
    case QuantMethod::kMxfp4GptOss:
      return "mxfp4 (gpt-oss)";
    case QuantMethod::kCompressedNvfp4:
      return "nvfp4 (compressed-tensors)";
    case QuantMethod::kCompressedMxfp4:
      return "mxfp4 (compressed-tensors)";
    case QuantMethod::kModelOptNvfp4:
      return "nvfp4 (modelopt)";
    case QuantMethod::kQuarkMxfp4:
      return "mxfp4 (quark)";
    case QuantMethod::kFp8Mxfp4:
      return "mxfp4 (fp8 with FP4 experts)";
  }
  return "unknown";
}

Report config_report(const ModelConfig& c) {
  Report report = {{"model_type", c.model_type},
                   {"num_hidden_layers", c.num_layers},
                   {"hidden_size", c.hidden_size},
                   {"intermediate_size", c.intermediate_size},
                   {"num_experts", c.num_experts},
                   {"num_experts_per_tok", c.top_k},
                   {"num_attention_heads", c.num_heads},
                   {"num_key_value_heads", c.num_kv_heads},
                   {"head_dim", c.head_dim},
                   {"vocab_size", c.vocab_size},
                   {"max_position_embeddings", c.max_position_embeddings},
                   {"quantization", quant_method_name(c.quant.method)},
                   {"group_size", c.quant.group_size},
                   {"declared_by", c.quant.declared_by},
                   {"exclude_modules", c.quant.exclude_modules.all()}};
  if (!c.quant.include_modules.empty()) report["fp4_modules"] = c.quant.include_modules.all();
  if (!c.quant.fp8_modules.empty()) report["fp8_modules"] = c.quant.fp8_modules.all();
  if (!c.quant.kv_cache_type.empty()) report["kv_cache"] = c.quant.kv_cache_type;
  return report;
}

Report tensor_report(const TensorEntry& tensor) {
  return {{"name", tensor.name},
          {"dtype", dtype_name(tensor.view.dtype)},
          {"shape", tensor.view.shape},
          {"bytes", tensor.view.num_bytes()},
          {"file", tensor.file}};
}

Report totals_report(const Checkpoint& checkpoint) {
  Report totals = Report::object();
  for (const TensorEntry& tensor : checkpoint.tensors()) {
    Report& total = totals[dtype_name(tensor.view.dtype)];
    if (total.is_null()) total = {{"tensors", 0}, {"bytes", 0}};
    total["tensors"] = total["tensors"].get<int64_t>() + 1;
    total["bytes"] = total["bytes"].get<int64_t>() + tensor.view.num_bytes();
  }
  return totals;
}

// Returns tensor_report() plus the file offset and, for a floating-point tensor, the range of its values.
Report values_report(const TensorEntry& tensor) {
  Report report = tensor_report(tensor);
  report["file_offset"] = tensor.file_offset;
  const TensorView& view = tensor.view;
  if (view.dtype != DType::kBF16 && view.dtype != DType::kF32) return report;
  double min = INFINITY, max = -INFINITY, squares = 0;
  int64_t num_not_finite = 0;
  const int64_t n = view.num_elems();
  for (int64_t i = 0; i < n; ++i) {
    const double x = view.dtype == DType::kF32 ? view.as<float>()[i] : bf16_to_float(view.as<bf16>()[i]);
    if (!std::isfinite(x)) {
      ++num_not_finite;
      continue;
    }
    min = std::min(min, x);
    max = std::max(max, x);
    squares += x * x;
  }
  report["not_finite"] = num_not_finite;
  if (n == num_not_finite) return report;
  report["min"] = min;
  report["max"] = max;
  report["rms"] = std::sqrt(squares / static_cast<double>(n - num_not_finite));
  return report;
}

Report projection_report(const Fp4Statistics& s) {
  Report exponents = Report::object();
  for (const auto& [exponent, count] : s.exponent_counts) exponents[std::to_string(exponent)] = count;
  return {{"scale_exponent_min", s.exponent_quantile(0)},
          {"scale_exponent_median", s.exponent_quantile(0.5)},
          {"scale_exponent_max", s.exponent_quantile(1)},
          {"scale_exponents", exponents},
          {"codes", s.code_counts},
          {"saturated", s.num_saturated()},
          {"blocks", s.num_blocks},
          {"zero_blocks", s.num_zero_blocks}};
}

Result<Report> experts_report(const Checkpoint& checkpoint, const ModelConfig& config) {
  Report layers = Report::array();
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    if (!config.layer_has_experts.empty() && !config.layer_has_experts[static_cast<size_t>(layer)]) continue;
    FP4MOE_ASSIGN_OR_RETURN(const MoeWeightsView moe, load_expert_weights(checkpoint, config, layer));
    ExpertStatistics statistics;
    for (const ExpertWeightsView& expert : moe.experts) statistics.add(expert);
    layers.push_back({{"layer", layer},
                      {"format", fp4_format_name(moe.format)},
                      {"gate", projection_report(statistics.gate)},
                      {"up", projection_report(statistics.up)},
                      {"down", projection_report(statistics.down)},
                      {"gate_up_scale_mismatches", statistics.num_gate_up_mismatches},
                      {"max_gate_up_scale_ratio", statistics.max_gate_up_ratio}});
  }
  return layers;
}

// Returns the format of every kind of module: "nvfp4", or "BF16 (1), nvfp4 (3)" if it has several.
Report formats_report(const Checkpoint& checkpoint, const ModelConfig& config) {
  Report report = Report::object();
  for (const auto& [kind, formats] : module_formats(checkpoint, config)) {
    std::string text;
    for (const auto& [format, count] : formats) {
      text += (text.empty() ? "" : ", ") + format;
      if (formats.size() > 1) text += " (" + std::to_string(count) + ")";
    }
    report[kind] = text;
  }
  return report;
}

// Returns the names of unused tensors: those in the model ("in_model"), for which a server refuses the
// checkpoint, and others ("elsewhere"), for which it only logs a warning. Empty if all tensors are used.
Report unused_report(const UnusedTensors& unused) {
  Report report = Report::object();
  for (const TensorEntry* tensor : unused.in_model) report["in_model"].push_back(tensor->name);
  for (const TensorEntry* tensor : unused.elsewhere) report["elsewhere"].push_back(tensor->name);
  return report;
}

// If only the configuration or only the tensors can be read, the report contains the other error as
// "config_error" or "tensors_error".
Result<Report> make_report(const InspectFlags& flags) {
  Report report = {{"model", flags.folder}};
  const Result<ModelConfig> config = load_model_config(flags.folder);
  const Result<Checkpoint> checkpoint = Checkpoint::open(flags.folder);
  if (!config.ok() && !checkpoint.ok()) return config.status();
  if (!flags.tensor.empty()) {
    if (!checkpoint.ok()) return checkpoint.status();
    const TensorEntry* tensor = checkpoint->find(flags.tensor);
    if (tensor == nullptr) return not_found("'" + flags.folder + "' has no tensor '" + flags.tensor + "'");
    report["tensor"] = values_report(*tensor);
    return report;
  }
  if (config.ok())
    report["config"] = config_report(*config);
  else
    report["config_error"] = config.status().to_string();
  if (checkpoint.ok()) {
    if (!flags.numerics) {  // omitted with --numerics, because that report is already long
      report["tensors"] = Report::array();
      for (const TensorEntry& tensor : checkpoint->tensors())
        report["tensors"].push_back(tensor_report(tensor));
    }
    report["totals"] = totals_report(*checkpoint);
    if (config.ok()) report["formats"] = formats_report(*checkpoint, *config);
    if (config.ok())
      if (Report unused = unused_report(find_unused_tensors(*checkpoint, *config)); !unused.empty())
        report["unused_tensors"] = std::move(unused);
    if (config.ok())
      if (const std::string mtp = describe_skipped_mtp(*config, *checkpoint); !mtp.empty())
        report["config"]["multi_token_prediction"] = mtp;
  } else {
    report["tensors_error"] = checkpoint.status().to_string();
  }
  if (!flags.experts && !flags.numerics) return report;
  if (!config.ok()) return config.status();
  if (!checkpoint.ok()) return checkpoint.status();
  if (config->quant.method == QuantMethod::kNone)
    return unsupported(std::string(flags.numerics ? "--numerics" : "--experts") + ": the experts of '" +
                       flags.folder +
                       "' are bf16; nearest legal choice: a checkpoint with FP4 experts, such "
                       "as `fp4moe quantize` writes");
  if (flags.experts) {
    FP4MOE_ASSIGN_OR_RETURN(report["experts"], experts_report(*checkpoint, *config));
  }
  if (flags.numerics) {
    FP4MOE_ASSIGN_OR_RETURN(report["numerics"], numerics_report(*checkpoint, *config, flags.layer));
  }
  return report;
}

std::string text_of(const Report& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

void print_fields(const Report& object) {
  for (const auto& [key, value] : object.items())
    std::printf("  %-24s %s\n", key.c_str(), text_of(value).c_str());
}

double percent(const Report& part, int64_t whole) {
  return 100.0 * static_cast<double>(part.get<int64_t>()) / static_cast<double>(std::max<int64_t>(whole, 1));
}

void print_projection(const char* name, const Report& p) {
  int64_t num_codes = 0;
  for (const Report& count : p["codes"]) num_codes += count.get<int64_t>();
  std::printf(
      "  %-4s scales 2^%s .. 2^%s .. 2^%s, saturated codes %.2f%%, zero blocks %.2f%%\n       codes 0 to 7, "
      "8 to 15:",
      name, p["scale_exponent_min"].dump().c_str(), p["scale_exponent_median"].dump().c_str(),
      p["scale_exponent_max"].dump().c_str(), percent(p["saturated"], num_codes),
      percent(p["zero_blocks"], p["blocks"].get<int64_t>()));
  for (const Report& count : p["codes"]) std::printf(" %.1f", percent(count, num_codes));
  std::printf(" %%\n");
}

void print_inspect(const Report& report) {
  std::printf("%s\n", text_of(report["model"]).c_str());
  for (const char* key : {"tensor", "config"})
    if (report.contains(key)) print_fields(report[key]);
  for (const char* key : {"config_error", "tensors_error"})
    if (report.contains(key)) std::printf("  %s\n", text_of(report[key]).c_str());
  if (report.contains("tensors"))
    for (const Report& t : report["tensors"])
      std::printf("%-64s %-8s %-22s %12" PRId64 "  %s\n", text_of(t["name"]).c_str(),
                  text_of(t["dtype"]).c_str(), t["shape"].dump().c_str(), t["bytes"].get<int64_t>(),
                  text_of(t["file"]).c_str());
  if (report.contains("totals"))
    for (const auto& [dtype, total] : report["totals"].items())
      std::printf("total %-8s %8" PRId64 " tensors %16" PRId64 " bytes\n", dtype.c_str(),
                  total["tensors"].get<int64_t>(), total["bytes"].get<int64_t>());
  if (report.contains("formats"))
    for (const auto& [kind, formats] : report["formats"].items())
      std::printf("format of %-40s %s\n", kind.c_str(), text_of(formats).c_str());
  if (report.contains("unused_tensors"))
    for (const auto& [where, names] : report["unused_tensors"].items())
      for (const Report& name : names)
        std::printf("not used (%s): %s\n", where == "in_model" ? "refused" : "warning only",
                    text_of(name).c_str());
  if (report.contains("numerics")) print_numerics(report["numerics"]);
  if (!report.contains("experts")) return;
  for (const Report& layer : report["experts"]) {
    std::printf("layer %" PRId64 " experts, %s; block scales: min .. median .. max\n",
                layer["layer"].get<int64_t>(), text_of(layer["format"]).c_str());
    for (const char* name : {"gate", "up", "down"}) print_projection(name, layer[name]);
    if (const int64_t mismatches = layer["gate_up_scale_mismatches"].get<int64_t>(); mismatches > 0)
      std::printf("  gate and up tensor scales differ in %" PRId64 " experts, by a factor of up to %.3f\n",
                  mismatches, layer["max_gate_up_scale_ratio"].get<double>());
  }
}

}  // namespace

void add_inspect(CLI::App& app, int& exit_code) {
  CLI::App& subcommand =
      *app.add_subcommand("inspect", "Show a checkpoint's configuration, tensors and FP4 statistics");
  const auto flags = std::make_shared<InspectFlags>();
  subcommand.add_option("model,--model-path", flags->folder, "checkpoint folder, or a repository id")
      ->required()
      ->type_name("FOLDER");
  add_revision_flag(subcommand, flags->folder, nullptr);
  subcommand.add_option("--tensor", flags->tensor, "show only this tensor and the range of its values");
  subcommand.add_flag("--experts", flags->experts,
                      "read all experts; show scales, codes and zero blocks by layer");
  CLI::Option* const numerics = subcommand.add_flag(
      "--numerics", flags->numerics,
      "run all experts; show the error of each scheme, saturation and unusual scales by layer and expert");
  subcommand.add_option("--layer", flags->layer, "with --numerics: only this layer")
      ->check(not_negative())
      ->needs(numerics);
  subcommand.add_flag("--json", flags->json, "print JSON");
  subcommand.callback([flags, &exit_code] {
    const Result<Report> report = make_report(*flags);
    if (!report.ok())
      exit_code = report_error(report.status());
    else if (flags->json)
      std::printf("%s\n", report->dump(1, ' ', false, Report::error_handler_t::replace).c_str());
    else
      print_inspect(*report);
  });
}

}  // namespace fp4moe
