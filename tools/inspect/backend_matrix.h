// The matrix of backends, computed by calling plan_moe() for every combination.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "moe/plan/plan.h"

namespace fp4moe {

// One combination of runner, a2a and ranks.
struct BackendCell {
  std::string runner, a2a;
  int tp = 1, ep = 1, dp = 1;  // dp > 1: with --enable-dp-attention
  std::string runs_as;         // "w4a4 by cpu_avx512"; empty if refused
  std::string refusal;
};

// Returns every runner x a2a x ranks 1, 2, 4 x ep (1, tp; with an a2a only tp, which the a2a implies) x dp
// (1, tp).
std::vector<BackendCell> backend_matrix(const MoeProblem& problem);

// Formats the matrix with one line per runner and the refusals as footnotes. markdown: a table with pipes.
std::string matrix_text(const std::vector<BackendCell>& cells, bool markdown);
nlohmann::json matrix_json(const std::vector<BackendCell>& cells);

// gpt-oss-20b's MoE layers in `format`.
MoeProblem gpt_oss_problem(Fp4Format format);

// Returns the text of docs/backends.md: the matrices of both formats for a CPU with AVX-512 and for a Hopper
// GPU, the schemes, the refused combinations, SGLang's names and flags, and the accuracy from `scores`
// (written by tests/tools/accuracy_matrix.py; null: not measured yet).
std::string backends_document(const nlohmann::json& scores);

}  // namespace fp4moe
