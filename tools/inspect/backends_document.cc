// Generates docs/backends.md from the backend table.
#include <cstdio>
#include <map>

#include "inspect/backend_matrix.h"
#include "model/sglang_names.h"
#include "moe/plan/legality.h"

namespace fp4moe {
namespace {

constexpr Fp4Format kFormats[] = {Fp4Format::kNvfp4, Fp4Format::kMxfp4, Fp4Format::kNone};

MoeProblem documented_problem(Fp4Format format) {
  MoeProblem p = gpt_oss_problem(format);
  p.isa = Isa::kAmx;  // fixed, so that the document does not depend on the machine
  return p;
}

MoeProblem gpu_problem(Fp4Format format) {
  MoeProblem p = gpt_oss_problem(format);
  p.device = DeviceKind::kCuda;
  p.compute_capability = 90;
  return p;
}

std::string runners_section(const MoeProblem& p, const char* device) {
  return std::string("## Runners x a2a x ranks, ") + fp4_format_name(p.format) + ", " +
         device_kind_name(p.device) + "\n\nLayers of gpt-oss-20b (H=" + std::to_string(p.hidden_size) +
         ", I=" + std::to_string(p.intermediate_size) + ", E=" + std::to_string(p.num_experts) + "), " +
         device + ", ranks 1, 2, 4.\n\n" + matrix_text(backend_matrix(p), /*markdown=*/true) + "\n";
}

std::string schemes_section() {
  std::string text =
      "## Schemes\n\n`--fp4-compute` with `--moe-runner-backend auto`, by `--dtype`; `docs/numerics.md` "
      "defines what each computes.\n\n| format | scheme | bfloat16 | float32 |\n| --- | --- | --- | --- |\n";
  for (const Fp4Format format : kFormats)
    for (const char* scheme : {"auto", "w4a16", "w4a4", "w4a8"}) {
      text += std::string("| ") + fp4_format_name(format) + " | " + scheme;
      for (const DType dtype : {DType::kBF16, DType::kF32}) {
        MoeProblem p = documented_problem(format);
        p.act_dtype = dtype;
        MoeChoice choice;
        choice.fp4_compute = scheme;
        const Result<MoePlan> plan = plan_moe(p, choice);
        text += " | " + (plan.ok() ? std::string(scheme_name(plan->scheme())) + " by " + runner_name(*plan)
                                   : plan.status().message());
      }
      text += " |\n";
    }
  return text;
}

std::string rules_section() {
  std::string text =
      "## Refused combinations\n\nThese are refused before any weight is read, with exit code 3 and an error "
      "that states the reason and the nearest legal choice:\n\n";
  for (const LegalityRule& rule : legality_rules()) text += std::string("* ") + rule.text + "\n";
  return text +
         "* a runner's name that contradicts the checkpoint's format or `--fp4-compute`, and w4a4 of MXFP4\n"
         "* `--quantization` that contradicts the checkpoint\n"
         "* `--speculative-algorithm` DFLASH and DSPARK; EAGLE and NEXTN without one layer for multi-token "
         "prediction in the checkpoint\n"
         "* `--speculative-draft-model-path` with another tokenizer than the model's\n";
}

std::string names_section(const char* flag, std::span<const SglangName> names) {
  std::string text = "| `" + std::string(flag) + "` | why not | nearest |\n| --- | --- | --- |\n";
  for (const SglangName& name : names)
    text += std::string("| ") + name.name + " | " + name.reason + " | " + name.nearest + " |\n";
  return text;
}

std::string flags_section() {
  std::string text =
      "## SGLang flags without effect\n\nThese are accepted; the startup log reports each one.\n\n| flag | "
      "in SGLang, and here |\n| --- | --- |\n";
  for (const SglangFlag& flag : sglang_flags())
    if (flag.fate == SglangFlag::Fate::kMoot)
      text += std::string("| `") + flag.names + "` | " + flag.text + " |\n";
  return text;
}

// Writes one line per row of `scores`; a row has the score of one prompt form.
std::string scores_section(const nlohmann::json& scores) {
  std::string text = "## Accuracy\n\n";
  if (scores.is_null()) return text + "Not measured yet.\n";
  text += "Fraction of correct answers, measured over HTTP on " + scores.value("date", "") +
          " by `tests/tools/accuracy_matrix.py`; every row must reach 0.98.\n\n"
          "| checkpoint | runner | a2a | tp | ep | dp | fabric | flags | form | questions | score |\n"
          "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n";
  for (const nlohmann::json& row : scores.at("rows")) {
    text += "|";
    for (const char* key : {"model", "runner", "a2a", "tp", "ep", "dp", "fabric"}) {
      const nlohmann::json& value = row.at(key);
      text += " " + (value.is_string() ? value.get<std::string>() : value.dump()) + " |";
    }
    std::string flags;
    for (const nlohmann::json& flag : row.at("flags"))
      flags += (flags.empty() ? "" : " ") + flag.get<std::string>();
    char numbers[64];
    std::snprintf(numbers, sizeof numbers, "%d | %.3f |", row.at("questions").get<int>(),
                  row.at("score").get<double>());
    text += " " + flags + " | " + row.at("form").get<std::string>() + " | " + numbers + "\n";
  }
  return text;
}

}  // namespace

std::string backends_document(const nlohmann::json& scores) {
  std::string text =
      "# Backends\n\nGenerated by `fp4moe backends --markdown` from the table that the engine plans with; a "
      "test fails if this page is stale. `fp4moe backends --model M` plans one checkpoint on one "
      "machine.\n\nA cell is `yes`, or lists the supported numbers of ranks (`dp`: with the same number of "
      "data-parallel attention groups) and footnotes that explain why other numbers are refused. With an "
      "a2a, ep equals tp.\n\n";
  for (const Fp4Format format : kFormats)
    text += runners_section(documented_problem(format), "CPU with AVX-512");
  for (const Fp4Format format : kFormats) text += runners_section(gpu_problem(format), "H100 or H200");
  text += schemes_section() + "\n" + rules_section() + "\n";
  text += "## SGLang names that are not supported\n\n" +
          names_section("--moe-runner-backend", sglang_runners()) + "\n" +
          names_section("--moe-a2a-backend", sglang_a2a()) + "\n";
  return text + flags_section() + "\n" + scores_section(scores);
}

}  // namespace fp4moe
