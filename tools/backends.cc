// fp4moe backends: every name of --moe-runner-backend and --moe-a2a-backend, what it runs as, or why not.
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/check.h"
#include "io/model_config.h"
#include "model/plan_model.h"
#include "moe/plan.h"
#include "verb.h"

namespace fp4moe {
namespace {

struct BackendsFlags {
  EngineConfig engine;
  bool json = false;
};

// One flag set to one name, all else as the user gave it.
struct Verdict {
  std::string flag, name, runs_as, refusal;
};

Verdict judge(const MoeProblem& problem, const std::string& flag, const std::string& name,
              const MoeChoice& choice) {
  const Result<MoePlan> plan = plan_moe(problem, choice);
  if (!plan.ok()) return {flag, name, "", plan.status().message()};
  return {flag, name, runner_name(*plan), ""};
}

std::vector<Verdict> judge_all(const MoeProblem& problem) {
  std::vector<Verdict> verdicts;
  for (const std::string& name : runner_names())
    verdicts.push_back(judge(problem, "moe-runner-backend", name, {.runner = name}));
  for (const std::string& name : a2a_names())
    verdicts.push_back(judge(problem, "moe-a2a-backend", name, {.a2a = name}));
  for (const char* name : {"auto", "w4a16", "w4a4", "w4a8"})
    verdicts.push_back(judge(problem, "fp4-compute", name, {.fp4_compute = name}));
  return verdicts;
}

// What the table is asked about: the model's MoE layers, or gpt-oss-sized ones in both formats.
Result<std::vector<MoeProblem>> problems(const EngineConfig& engine) {
  if (!engine.model_path.empty()) {
    FP4MOE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(engine.model_path));
    FP4MOE_ASSIGN_OR_RETURN(const ModelPlan plan, plan_model(config, engine));
    return std::vector<MoeProblem>{plan.moe.problem()};
  }
  std::vector<MoeProblem> both;
  for (Fp4Format format : {Fp4Format::kMxfp4, Fp4Format::kNvfp4}) {
    MoeProblem p;
    p.hidden_size = p.intermediate_size = 2880;
    p.num_experts = 32;
    p.top_k = 4;
    p.format = format;
    both.push_back(p);
  }
  return both;
}

void print_text(const MoeProblem& problem, const std::vector<Verdict>& verdicts) {
  std::printf("%s\n", describe(*plan_moe(problem, {})).c_str());
  for (const Verdict& v : verdicts)
    std::printf("  --%s %-20s %s%s\n", v.flag.c_str(), v.name.c_str(),
                v.refusal.empty() ? "runs as " : "refused: ",
                v.refusal.empty() ? v.runs_as.c_str() : v.refusal.c_str());
}

nlohmann::json to_json(const MoeProblem& problem, const std::vector<Verdict>& verdicts) {
  nlohmann::json rows = nlohmann::json::array();
  for (const Verdict& v : verdicts) {
    nlohmann::json row = {{"flag", v.flag}, {"name", v.name}, {"legal", v.refusal.empty()}};
    row[v.refusal.empty() ? "runs_as" : "reason"] = v.refusal.empty() ? v.runs_as : v.refusal;
    rows.push_back(row);
  }
  return {{"format", fp4_format_name(problem.format)},
          {"hidden_size", problem.hidden_size},
          {"intermediate_size", problem.intermediate_size},
          {"num_experts", problem.num_experts},
          {"top_k", problem.top_k},
          {"device", device_kind_name(problem.device)},
          {"isa", isa_name(problem.isa)},
          {"backends", rows}};
}

Status run_backends(const BackendsFlags& flags) {
  FP4MOE_ASSIGN_OR_RETURN(const std::vector<MoeProblem> asked, problems(flags.engine));
  nlohmann::json all = nlohmann::json::array();
  for (const MoeProblem& problem : asked) {
    const std::vector<Verdict> verdicts = judge_all(problem);
    if (flags.json)
      all.push_back(to_json(problem, verdicts));
    else
      print_text(problem, verdicts);
  }
  if (flags.json) std::printf("%s\n", all.dump(2).c_str());
  return {};
}

}  // namespace

void add_backends(CLI::App& app, int& exit_code) {
  CLI::App* verb =
      app.add_subcommand("backends", "which backends run on this machine, and why others do not");
  auto flags = std::make_shared<BackendsFlags>();
  verb->add_option("--model,--model-path", flags->engine.model_path,
                   "ask about this checkpoint's MoE layers");
  verb->add_option("--dtype", flags->engine.dtype, "activations: auto, bfloat16 or float32");
  verb->add_option("--device", flags->engine.device, "auto, cpu or cuda");
  verb->add_flag("--json", flags->json, "print JSON");
  verb->callback([flags, &exit_code] {
    if (const Status status = run_backends(*flags); !status.ok()) exit_code = report_error(status);
  });
}

}  // namespace fp4moe
