// fp4moe backends: prints, for every runner x a2a x ranks, the scheme and runner that it runs as, or why it
// is refused.
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/check.h"
#include "inspect/backend_matrix.h"
#include "inspect/gpu_flags.h"
#include "io/config/model_config.h"
#include "io/file.h"
#include "model/plan_model.h"
#include "moe/plan/plan.h"
#include "subcommand.h"

namespace fp4moe {
namespace {

struct BackendsFlags {
  EngineConfig engine;
  GpuFlags gpu;
  std::string scores;
  bool json = false, markdown = false;
};

// Returns the problems to plan: the model's MoE layers, or else gpt-oss-20b's layers in both formats.
Result<std::vector<MoeProblem>> problems(const EngineConfig& engine, const GpuFlags& gpu) {
  FP4MOE_ASSIGN_OR_RETURN(const std::optional<AbsentGpu> absent_gpu, gpu.absent());
  if (!engine.model_path.empty()) {
    FP4MOE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(engine.model_path));
    FP4MOE_ASSIGN_OR_RETURN(const ModelPlan plan, plan_model(config, engine, absent_gpu));
    return std::vector<MoeProblem>{plan.moe.problem()};
  }
  FP4MOE_ASSIGN_OR_RETURN(const DeviceChoice device, choose_device(engine.device, absent_gpu));
  std::vector<MoeProblem> asked;
  for (const Fp4Format format : {Fp4Format::kMxfp4, Fp4Format::kNvfp4}) {
    asked.push_back(gpt_oss_problem(format));
    asked.back().device = device.kind;
    asked.back().compute_capability = device.compute_capability;
    asked.back().isa = best_isa();
  }
  return asked;
}

void print_backends(const MoeProblem& problem) {
  const Result<MoePlan> plan = plan_moe(problem, {});
  std::printf("%s\n", plan.ok() ? describe(*plan).c_str() : plan.status().message().c_str());
  std::printf("%s\n", matrix_text(backend_matrix(problem), /*markdown=*/false).c_str());
}

nlohmann::json to_json(const MoeProblem& problem) {
  return {{"format", fp4_format_name(problem.format)},
          {"hidden_size", problem.hidden_size},
          {"intermediate_size", problem.intermediate_size},
          {"num_experts", problem.num_experts},
          {"top_k", problem.top_k},
          {"device", device_kind_name(problem.device)},
          {"isa", isa_name(problem.isa)},
          {"backends", matrix_json(backend_matrix(problem))}};
}

// Returns null if no path is given.
Result<nlohmann::json> read_scores(const std::string& path) {
  constexpr int64_t kMaxBytes = 16 << 20;
  if (path.empty()) return nlohmann::json();
  FP4MOE_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kMaxBytes));
  nlohmann::json scores = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!scores.is_object() || !scores.contains("rows") || !scores["rows"].is_array())
    return data_loss(path + ": expected a JSON object with an array \"rows\"");
  return scores;
}

Status run_backends(const BackendsFlags& flags) {
  if (flags.markdown) {
    FP4MOE_ASSIGN_OR_RETURN(const nlohmann::json scores, read_scores(flags.scores));
    std::printf("%s", backends_document(scores).c_str());
    return {};
  }
  FP4MOE_ASSIGN_OR_RETURN(const std::vector<MoeProblem> asked, problems(flags.engine, flags.gpu));
  nlohmann::json all = nlohmann::json::array();
  for (const MoeProblem& problem : asked) {
    if (flags.json)
      all.push_back(to_json(problem));
    else
      print_backends(problem);
  }
  if (flags.json) std::printf("%s\n", all.dump(2).c_str());
  return {};
}

}  // namespace

void add_backends(CLI::App& app, int& exit_code) {
  CLI::App* subcommand =
      app.add_subcommand("backends", "Show which backends run on this machine and why others do not");
  auto flags = std::make_shared<BackendsFlags>();
  subcommand
      ->add_option(
          "--model,--model-path", flags->engine.model_path,
          "checkpoint folder, or a repository id, whose MoE layers to plan; default: gpt-oss-20b's layers")
      ->type_name("FOLDER");
  add_revision_flag(*subcommand, flags->engine.model_path, nullptr);
  subcommand->add_option("--dtype", flags->engine.dtype, "activation type")
      ->type_name("TEXT:{auto,bfloat16,float32}");
  subcommand->add_option("--device", flags->engine.device, "device to plan for")
      ->type_name("TEXT:{auto,cpu,cuda}");
  add_gpu_flags(*subcommand, flags->gpu);
  CLI::Option* json = subcommand->add_flag("--json", flags->json, "print JSON");
  subcommand->add_flag("--markdown", flags->markdown, "print docs/backends.md")->excludes(json);
  subcommand->add_option("--scores", flags->scores, "with --markdown: file written by accuracy_matrix.py")
      ->type_name("FILE");
  subcommand->callback([flags, &exit_code] {
    if (const Status status = run_backends(*flags); !status.ok()) exit_code = report_error(status);
  });
}

}  // namespace fp4moe
