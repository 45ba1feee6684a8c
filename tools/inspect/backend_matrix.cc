#include "inspect/backend_matrix.h"

#include <algorithm>
#include <map>
#include <utility>

namespace fp4moe {
namespace {

constexpr int kRanks[] = {1, 2, 4};

BackendCell judge(const MoeProblem& problem, BackendCell cell) {
  MoeChoice choice;
  choice.runner = cell.runner;
  choice.a2a = cell.a2a;
  choice.tp = cell.tp;
  choice.ep = cell.ep;
  choice.dp = cell.dp;
  choice.enable_dp_attention = cell.dp > 1;
  choice.fabric = cell.tp > 1 ? "threads" : "local";  // "auto" would pick mpi under mpirun
  const Result<MoePlan> plan = plan_moe(problem, choice);
  if (plan.ok())
    cell.runs_as = std::string(scheme_name(plan->scheme())) + " by " + runner_name(*plan);
  else
    cell.refusal = plan.status().message();
  return cell;
}

// Returns the title of a cell's column: its a2a or, without an a2a on several ranks, "none" and the ep.
std::string column_of(const BackendCell& cell) {
  if (cell.a2a != "none" || cell.tp == 1) return cell.a2a;
  return cell.ep == 1 ? "none, ep 1" : "none, ep = tp";
}

// Numbers distinct refusal texts in order of first use.
class Footnotes {
 public:
  int number(const std::string& text) {
    const auto [at, is_new] = numbers_.try_emplace(text, static_cast<int>(texts_.size()) + 1);
    if (is_new) texts_.push_back(text);
    return at->second;
  }
  const std::vector<std::string>& texts() const { return texts_; }

 private:
  std::map<std::string, int> numbers_;
  std::vector<std::string> texts_;
};

using Row = std::vector<std::string>;

// Returns "yes", or otherwise the supported tp sizes ("4dp": with dp = tp) or "no", followed by the footnote
// numbers of the refusals.
std::string cell_text(const std::vector<const BackendCell*>& cells, Footnotes& notes) {
  std::string legal, refused;
  size_t num_legal = 0;
  for (const BackendCell* cell : cells) {
    if (cell->refusal.empty()) {
      ++num_legal;
      legal += (legal.empty() ? "" : " ") + std::to_string(cell->tp) + (cell->dp > 1 ? "dp" : "");
    } else {
      const std::string mark = "[" + std::to_string(notes.number(cell->refusal)) + "]";
      if (refused.find(mark) == std::string::npos) refused += mark;
    }
  }
  if (num_legal == cells.size()) return "yes";
  return (num_legal == 0 ? "no" : legal) + " " + refused;
}

std::string table_text(const std::vector<Row>& rows, bool markdown) {
  std::vector<size_t> widths(rows[0].size(), 0);
  for (const Row& row : rows)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::string text;
  for (size_t r = 0; r < rows.size(); ++r) {
    text += markdown ? "|" : " ";
    for (size_t i = 0; i < rows[r].size(); ++i) {
      text += " " + rows[r][i];
      text += markdown ? " |" : std::string(widths[i] - rows[r][i].size() + 1, ' ');
    }
    while (text.back() == ' ') text.pop_back();
    text += "\n";
    if (r > 0 || !markdown) continue;
    text += "|";
    for (size_t i = 0; i < rows[0].size(); ++i) text += " --- |";
    text += "\n";
  }
  return text;
}

}  // namespace

std::vector<BackendCell> backend_matrix(const MoeProblem& problem) {
  std::vector<BackendCell> cells;
  for (const std::string& runner : runner_names())
    for (const std::string& a2a : a2a_names())
      for (const int tp : kRanks)
        for (const int ep : {1, tp}) {
          if (ep != tp && a2a != "none") continue;
          for (const int dp : {1, tp}) {
            if (dp == 1 || tp > 1) cells.push_back(judge(problem, {runner, a2a, tp, ep, dp, "", ""}));
            if (tp == 1) break;
          }
          if (tp == 1) break;
        }
  return cells;
}

std::string matrix_text(const std::vector<BackendCell>& cells, bool markdown) {
  std::vector<std::string> columns, runners;
  std::map<std::pair<std::string, std::string>, std::vector<const BackendCell*>> by_place;
  std::map<std::string, std::string> runs_as;
  const auto once = [](std::vector<std::string>& names, const std::string& name) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  for (const BackendCell& cell : cells) {
    once(columns, column_of(cell));
    once(runners, cell.runner);
    by_place[{cell.runner, column_of(cell)}].push_back(&cell);
    if (!cell.runs_as.empty()) runs_as.try_emplace(cell.runner, cell.runs_as);
  }
  Footnotes notes;
  std::vector<Row> rows = {{"--moe-runner-backend", "runs as"}};
  for (const std::string& column : columns) rows[0].push_back(column == "none" ? "one rank, none" : column);
  for (const std::string& runner : runners) {
    Row row = {runner, runs_as.count(runner) != 0 ? runs_as[runner] : "-"};
    for (const std::string& column : columns) row.push_back(cell_text(by_place[{runner, column}], notes));
    rows.push_back(row);
  }
  std::string text = table_text(rows, markdown);
  for (size_t i = 0; i < notes.texts().size(); ++i)
    text += (markdown && i == 0 ? "\n" : "") + std::string(markdown ? "" : "  ") + "[" +
            std::to_string(i + 1) + "] " + notes.texts()[i] + (markdown ? "\\" : "") + "\n";
  return text;
}

nlohmann::json matrix_json(const std::vector<BackendCell>& cells) {
  nlohmann::json rows = nlohmann::json::array();
  for (const BackendCell& c : cells) {
    nlohmann::json row = {{"runner", c.runner}, {"a2a", c.a2a}, {"tp", c.tp},
                          {"ep", c.ep},         {"dp", c.dp},   {"legal", c.refusal.empty()}};
    row[c.refusal.empty() ? "runs_as" : "reason"] = c.refusal.empty() ? c.runs_as : c.refusal;
    rows.push_back(std::move(row));
  }
  return rows;
}

MoeProblem gpt_oss_problem(Fp4Format format) {
  MoeProblem p;
  p.hidden_size = p.intermediate_size = 2880;
  p.num_experts = 32;
  p.top_k = 4;
  p.format = format;
  return p;
}

}  // namespace fp4moe
