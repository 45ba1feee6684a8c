// Generates docs/backends.md from the backend table.
#include <cstdio>
#include <map>

#include "backend_matrix.h"
#include "model/sglang_names.h"
#include "moe/legality.h"

namespace fp4moe {
namespace {

constexpr Fp4Format kFormats[] = {Fp4Format::kNvfp4, Fp4Format::kMxfp4};

MoeProblem documented_problem(Fp4Format format) {
  MoeProblem p = gpt_oss_problem(format);
  p.isa = Isa::kAmx;  // fixed, so the document does not depend on the machine
  return p;
}

std::string schemes_section() {
  std::string text =
      "## Schemes\n\n`--fp4-compute` with `--moe-runner-backend auto`, by `--dtype`; `docs/numerics.md` says "
      "what each computes.\n\n| format | scheme | bfloat16 | float32 |\n| --- | --- | --- | --- |\n";
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
      "## What is refused\n\nBefore any weight is read, with exit code 3, the reason and the nearest legal "
      "choice:\n\n";
  for (const LegalityRule& rule : legality_rules()) text += std::string("* ") + rule.text + "\n";
  return text +
         "* a runner's name that contradicts the checkpoint's format or `--fp4-compute`, and w4a4 of MXFP4\n"
         "* `--quantization` that contradicts the checkpoint\n"
         "* speculative decoding\n";
}

std::string names_section(const char* flag, std::span<const SglangName> names) {
  std::string text = "| `" + std::string(flag) + "` | why not | nearest |\n| --- | --- | --- |\n";
  for (const SglangName& name : names)
    text += std::string("| ") + name.name + " | " + name.reason + " | " + name.nearest + " |\n";
  return text;
}

std::string flags_section() {
  std::string text =
      "## Flags of SGLang's without an effect\n\nAccepted; a log line at start says the same.\n\n| flag | in "
      "SGLang, and here |\n| --- | --- |\n";
  for (const SglangFlag& flag : sglang_flags())
    if (flag.fate == SglangFlag::Fate::kMoot)
      text += std::string("| `") + flag.names + "` | " + flag.text + " |\n";
  return text;
}

// One line per row, with both prompt forms' scores if both were measured.
std::string scores_section(const nlohmann::json& scores) {
  std::string text = "## Accuracy\n\n";
  if (scores.is_null()) return text + "Not measured yet.\n";
  text += "Share of right answers over HTTP, " + scores.value("date", "") +
          ", by `tests/tools/accuracy_matrix.py`; every row must reach 0.98.\n\n"
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
      "# Backends\n\nWritten by `fp4moe backends --markdown`, from the table that the engine plans with; a "
      "test fails when this page is stale. `fp4moe backends --model M` asks about one checkpoint on one "
      "machine.\n\nA cell is `yes`, or lists the ranks (`dp`: with data-parallel attention of as many "
      "groups) "
      "that are legal, and the reasons why others are not. Over an a2a, ep is tp.\n\n";
  for (const Fp4Format format : kFormats) {
    const MoeProblem p = documented_problem(format);
    text += std::string("## Runners x a2a x ranks, ") + fp4_format_name(format) +
            "\n\nLayers of gpt-oss-20b (H=" + std::to_string(p.hidden_size) +
            ", I=" + std::to_string(p.intermediate_size) + ", E=" + std::to_string(p.num_experts) +
            "), CPU with AVX-512, ranks 1, 2, 4.\n\n" + matrix_text(backend_matrix(p), /*markdown=*/true) +
            "\n";
  }
  text += schemes_section() + "\n" + rules_section() + "\n";
  text += "## Names of SGLang's that are not here\n\n" +
          names_section("--moe-runner-backend", sglang_runners()) + "\n" +
          names_section("--moe-a2a-backend", sglang_a2a()) + "\n";
  return text + flags_section() + "\n" + scores_section(scores);
}

}  // namespace fp4moe
