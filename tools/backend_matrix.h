// The matrix of backends, as plan_moe() answers it: no table of its own.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "moe/plan.h"

namespace fp4moe {

// One combination of runner, a2a and ranks.
struct BackendCell {
  std::string runner, a2a;
  int tp = 1, ep = 1, dp = 1;  // dp > 1: with --enable-dp-attention
  std::string runs_as;         // "w4a4 by cpu_avx512"; empty if refused
  std::string refusal;
};

// Every runner x a2a x ranks 1, 2, 4 x ep (1, tp; tp alone over an a2a, which raises it) x dp (1, tp).
std::vector<BackendCell> backend_matrix(const MoeProblem& problem);

// The same by runner, one line each, and the reasons below. markdown: a table with pipes.
std::string matrix_text(const std::vector<BackendCell>& cells, bool markdown);
nlohmann::json matrix_json(const std::vector<BackendCell>& cells);

// gpt-oss-20b's MoE layers under `format`.
MoeProblem gpt_oss_problem(Fp4Format format);

// docs/backends.md: the matrix of both formats for a CPU with AVX-512, schemes, names of SGLang's, and the
// scores in `scores` (what tests/tools/accuracy_matrix.py writes; null: none yet).
std::string backends_document(const nlohmann::json& scores);

}  // namespace fp4moe
