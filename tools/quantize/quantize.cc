// fp4moe quantize: writes a bf16 checkpoint with FP4 experts and reports the accuracy loss.
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>

#include "base/check.h"
#include "base/cpu_info.h"
#include "base/log.h"
#include "eval/text_pass.h"
#include "flag_checks.h"
#include "io/checkpoint/unused_tensors.h"
#include "io/file.h"
#include "io/write/quantize_checkpoint.h"
#include "moe/calibration.h"
#include "quantize/quantize_report.h"
#include "subcommand.h"

namespace fp4moe {
namespace {

struct QuantizeFlags {
  std::string model, out, format = "mxfp4", search = "absmax";
  QuantizeOptions options;
  std::string calib;
  int64_t calib_tokens = 16384;
  int threads = 0;
  bool allow_unused_tensors = false;
  std::vector<std::string> evals;  // NAME=FILE
  std::string report, report_json;
};

// Redraws one progress line; prints nothing if stderr is not a terminal.
void progress(const char* what, int64_t done, int64_t total) {
  if (isatty(STDERR_FILENO) == 0) return;
  std::fprintf(stderr, "\r%s: %3d %%", what, static_cast<int>(total > 0 ? 100 * done / total : 100));
  if (done == total) std::fprintf(stderr, "\n");
}

Result<std::vector<QuestionOptions>> parse_evals(const std::vector<std::string>& evals) {
  std::vector<QuestionOptions> all;
  for (const std::string& text : evals) {
    const size_t at = text.find('=');
    const std::string name = text.substr(0, at);
    if (at == text.npos || (name != "gsm8k" && name != "gpqa" && name != "mmlu"))
      return invalid_argument("invalid --eval value '" + text + "'; use gsm8k=FILE, gpqa=FILE or mmlu=FILE");
    QuestionOptions options;
    options.eval_name = name;
    options.data_path = text.substr(at + 1);
    FP4MOE_RETURN_IF_ERROR(load_questions(options).status());
    all.push_back(options);
  }
  return all;
}

using Texts = std::vector<std::vector<int32_t>>;

// Runs the bf16 model over the texts and returns the activation amax of every module, which the layers
// record.
Result<std::map<std::string, float>> calibrate(TextModel& model, const Calibration& calibration,
                                               const ModelConfig& config, const Texts& texts) {
  for (size_t i = 0; i < texts.size(); ++i) {
    FP4MOE_RETURN_IF_ERROR(model.forward(texts[i]).status());
    progress("calibrating", static_cast<int64_t>(i) + 1, std::ssize(texts));
  }
  // Records are in loading order: for each layer, its experts and then its shared expert, or its MLP.
  std::map<std::string, float> amax;
  size_t next = 0;
  const auto add = [&](const std::string& mlp, const ExpertAmax& record, size_t e) {
    amax[mlp + ".gate_proj"] = amax[mlp + ".up_proj"] = record.input[e];
    amax[mlp + ".down_proj"] = record.intermediate[e];
  };
  const std::string shared = config.shared_expert_gate ? ".shared_expert" : ".shared_experts";
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const std::string mlp = "model.layers." + std::to_string(layer) + ".mlp";
    const bool has_experts =
        config.layer_has_experts.empty() || config.layer_has_experts[static_cast<size_t>(layer)];
    FP4MOE_CHECK(next < calibration.size(), "a record for every layer");
    const ExpertAmax& record = *calibration[next++];
    if (!has_experts) add(mlp, record, 0);
    for (size_t e = 0; has_experts && e < record.input.size(); ++e)
      add(mlp + ".experts." + std::to_string(e), record, e);
    if (has_experts && config.num_shared_experts > 0) add(mlp + shared, *calibration[next++], 0);
  }
  FP4MOE_CHECK(next == calibration.size(), "a layer for every record");
  return amax;
}

// Returns a module's amax. An expert without tokens gets the maximum over its layer's experts, or 1 if none
// of them had tokens.
float amax_of(const std::map<std::string, float>& amax, const std::string& module) {
  if (const auto found = amax.find(module); found != amax.end() && found->second > 0) return found->second;
  const size_t experts = module.find(".experts."), projection = module.rfind('.');
  float most = 0;
  for (const auto& [name, value] : amax)
    if (experts != module.npos && name.starts_with(module.substr(0, experts + 9)) &&
        name.ends_with(module.substr(projection)))
      most = std::max(most, value);
  return most > 0 ? most : 1;
}

// Writes the checkpoint. If there are texts, first loads the source model, which both the calibration and the
// comparison of predictions use.
Status write_and_compare(const QuantizeFlags& flags, bool calibrates, const ModelConfig& config,
                         const Texts& texts, QuantizeReport& report) {
  Calibration calibration;
  std::optional<TextModel> before;
  if (!texts.empty()) {
    const CalibrationScope scope(calibration);
    FP4MOE_ASSIGN_OR_RETURN(before, TextModel::load(flags.model, flags.threads));
  }
  QuantizeOptions options = flags.options;
  std::map<std::string, float> amax;
  if (calibrates) {
    FP4MOE_ASSIGN_OR_RETURN(amax, calibrate(*before, calibration, config, texts));
    options.input_amax = [&](const std::string& module) { return amax_of(amax, module); };
    report.calibration = flags.calib;
  }
  {
    ThreadPool pool(flags.threads > 0 ? flags.threads : available_cores());
    FP4MOE_ASSIGN_OR_RETURN(const Checkpoint source, Checkpoint::open(flags.model));
    FP4MOE_ASSIGN_OR_RETURN(report.result, quantize_checkpoint(source, config, flags.out, options, pool));
  }
  if (texts.empty()) return {};
  FP4MOE_ASSIGN_OR_RETURN(TextModel after, TextModel::load(flags.out, flags.threads));
  const auto say = [&](int64_t done) { progress("comparing", done, std::ssize(texts)); };
  FP4MOE_ASSIGN_OR_RETURN(report.predictions, compare_predictions(*before, after, texts, say));
  return {};
}

Status check_source(const QuantizeFlags& flags, const ModelConfig& config) {
  FP4MOE_ASSIGN_OR_RETURN(const Checkpoint source, Checkpoint::open(flags.model));
  set_log_sink([](LogLevel level, const std::string& line) {
    if (level == LogLevel::kWarning) std::fprintf(stderr, "warning: %s\n", line.c_str());
  });
  const Status status = check_unused_tensors(source, config, flags.allow_unused_tensors);
  set_log_sink({});
  return status;
}

// Reports may be put into the output folder, which does not exist yet.
Status check_report(const char* flag, const std::string& path, const std::string& out) {
  if (path.empty()) return {};
  const auto whole = [](const std::string& name) {
    return std::filesystem::absolute(name).lexically_normal();
  };
  if (!out.empty() && whole(path).string().starts_with((whole(out) / "").string())) return {};
  return check_writable(flag, path);
}

Status run_quantize(QuantizeFlags flags) {
  FP4MOE_RETURN_IF_ERROR(check_report("--report", flags.report, flags.out));
  FP4MOE_RETURN_IF_ERROR(check_report("--report-json", flags.report_json, flags.out));
  QuantizeOptions& options = flags.options;
  options.format = flags.format == "nvfp4" ? Fp4Format::kNvfp4 : Fp4Format::kMxfp4;
  options.search = flags.search == "mse" ? ScaleSearch::kMse : ScaleSearch::kAbsmax;
  options.progress = [](int64_t done, int64_t total) { progress("quantizing", done, total); };
  FP4MOE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(flags.model));
  FP4MOE_RETURN_IF_ERROR(check_quantize(config, options).status());
  FP4MOE_RETURN_IF_ERROR(check_source(flags, config));
  FP4MOE_ASSIGN_OR_RETURN(const std::vector<QuestionOptions> evals, parse_evals(flags.evals));
  Texts texts;
  if (!flags.calib.empty()) {
    FP4MOE_ASSIGN_OR_RETURN(texts, read_texts(flags.calib, flags.model, flags.calib_tokens));
  }

  QuantizeReport report{.source = flags.model,
                        .folder = flags.out,
                        .format = flags.format,
                        .search = flags.search,
                        .calibration = {},
                        .result = {},
                        .predictions = {},
                        .scores = {}};
  const bool calibrates = !texts.empty() && options.format == Fp4Format::kNvfp4;
  FP4MOE_RETURN_IF_ERROR(write_and_compare(flags, calibrates, config, texts, report));
  if (!evals.empty()) {
    FP4MOE_ASSIGN_OR_RETURN(const auto before, score_model(flags.model, flags.threads, evals));
    FP4MOE_ASSIGN_OR_RETURN(const auto after, score_model(flags.out, flags.threads, evals));
    for (size_t i = 0; i < evals.size(); ++i)
      report.scores.push_back({evals[i].eval_name, before[i], after[i]});
  }
  print(report);
  if (!flags.report.empty()) FP4MOE_RETURN_IF_ERROR(write_text_file(flags.report, to_html(report)));
  if (!flags.report_json.empty())
    FP4MOE_RETURN_IF_ERROR(write_text_file(flags.report_json, to_json(report).dump(1) + "\n"));
  return {};
}

}  // namespace

void add_quantize(CLI::App& app, int& exit_code) {
  CLI::App& subcommand =
      *app.add_subcommand("quantize", "Write a copy of a bf16 checkpoint with FP4 experts");
  const auto flags = std::make_shared<QuantizeFlags>();
  QuantizeFlags& f = *flags;
  subcommand.add_option("model", f.model, "bf16 checkpoint folder, or a repository id")
      ->required()
      ->type_name("FOLDER");
  add_revision_flag(subcommand, f.model, nullptr);
  subcommand.add_option("out", f.out, "output folder; must be absent or empty")
      ->required()
      ->type_name("FOLDER");
  subcommand.add_option("--format", f.format, "format of the experts: mxfp4 or nvfp4")
      ->check(CLI::IsMember({"mxfp4", "nvfp4"}))
      ->capture_default_str();
  subcommand
      .add_option("--dialect", f.options.dialect,
                  "how tensors and the quantization config are named: auto, gpt-oss, modelopt or "
                  "compressed-tensors")
      ->type_name("TEXT:{auto,gpt-oss,modelopt,compressed-tensors}")
      ->capture_default_str();
  subcommand
      .add_option("--scale-search", f.search,
                  "block scales: absmax, or mse (the scale with the smallest squared error)")
      ->check(CLI::IsMember({"absmax", "mse"}))
      ->capture_default_str();
  subcommand.add_option(
      "--exclude", f.options.exclude,
      "pattern of MLPs and shared experts to keep in bf16: a name with * and ?, or re:EXPRESSION");
  subcommand.add_option("--shards", f.options.num_shards, "number of safetensors files")
      ->capture_default_str();
  subcommand
      .add_option(
          "--calib", f.calib,
          "text file, or .jsonl file with \"text\" or \"question\" and \"answer\", for calibrating NVFP4's "
          "input "
          "scales and comparing predictions; without it, NVFP4 is written for bf16 activations (W4A16)")
      ->type_name("FILE");
  subcommand.add_option("--calib-tokens", f.calib_tokens, "maximum tokens read from --calib")
      ->check(in_range(int64_t{2}, int64_t{1} << 30))
      ->capture_default_str();
  subcommand.add_option("--eval", f.evals,
                        "question set for scoring both checkpoints: gsm8k=FILE, gpqa=FILE or mmlu=FILE");
  subcommand.add_flag("--allow-unused-tensors", f.allow_unused_tensors,
                      "if the checkpoint contains model tensors that the engine does not use, copy them "
                      "instead of refusing it");
  subcommand.add_option("--report", f.report, "HTML report file: errors by layer, predictions, scores")
      ->type_name("FILE");
  subcommand.add_option("--report-json", f.report_json, "JSON file with the same report")->type_name("FILE");
  subcommand.add_option("--threads", f.threads, "CPU threads; default: all cores")->check(not_negative());
  subcommand.callback([flags, &exit_code] {
    if (const Status status = run_quantize(*flags); !status.ok()) exit_code = report_error(status);
  });
}

}  // namespace fp4moe
