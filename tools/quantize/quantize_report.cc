#include "quantize/quantize_report.h"

#include <fmt/format.h>

#include <map>
#include <set>

#include "base/check.h"
#include "eval/eval_score.h"
#include "fp4moe/config.h"
#include "fp4moe/engine.h"
#include "fp4moe/server.h"
#include "inspect/html_page.h"

namespace fp4moe {
namespace {

using Report = nlohmann::ordered_json;

// Returns the relative L2 error over all quantised weights.
double whole_error(const QuantizeResult& result) {
  WeightError sum;
  for (const ProjectionError& e : result.errors) sum.error += e.weights.error, sum.energy += e.weights.energy;
  return sum.relative_l2();
}

std::string number(double x) { return fmt::format("{:.4g}", x); }

std::vector<std::vector<std::string>> prediction_rows(const PredictionReport& p) {
  return {{"tokens", std::to_string(p.num_tokens)},
          {"KL divergence, mean (nats)", number(p.kl_mean)},
          {"KL divergence, 99th percentile", number(p.kl_p99)},
          {"KL divergence, largest", number(p.kl_max)},
          {"same most likely token", fmt::format("{:.2f} %", 100 * p.same_top1)},
          {"perplexity before", number(p.perplexity_reference)},
          {"perplexity after", number(p.perplexity_other)}};
}

}  // namespace

Report to_json(const QuantizeReport& r) {
  Report layers = Report::array();
  for (const ProjectionError& e : r.result.errors)
    layers.push_back(
        {{"layer", e.layer}, {"projection", e.projection}, {"relative_l2", e.weights.relative_l2()}});
  Report json = {{"source", r.source},
                 {"folder", r.folder},
                 {"format", r.format},
                 {"dialect", r.result.dialect},
                 {"scale_search", r.search},
                 {"calibration", r.calibration},
                 {"source_bytes", r.result.source_bytes},
                 {"written_bytes", r.result.written_bytes},
                 {"modules", r.result.num_modules},
                 {"relative_l2", whole_error(r.result)},
                 {"layers", layers}};
  if (r.predictions)
    json["predictions"] = {{"tokens", r.predictions->num_tokens},
                           {"kl_mean", r.predictions->kl_mean},
                           {"kl_p99", r.predictions->kl_p99},
                           {"kl_max", r.predictions->kl_max},
                           {"same_top1", r.predictions->same_top1},
                           {"perplexity_before", r.predictions->perplexity_reference},
                           {"perplexity_after", r.predictions->perplexity_other}};
  for (const QuantizeReport::Scores& s : r.scores)
    json["scores"].push_back({{"eval_name", s.eval_name}, {"before", s.before}, {"after", s.after}});
  return json;
}

std::string to_html(const QuantizeReport& r) {
  HtmlPage page("fp4moe quantize: " + r.folder);
  page.table({"property", "value"},
             {{"source", r.source},
              {"format, dialect", r.format + ", " + r.result.dialect},
              {"block scales", r.search},
              {"calibration", r.calibration.empty() ? "none (weights only)" : r.calibration},
              {"modules quantised", std::to_string(r.result.num_modules)},
              {"tensor bytes", fmt::format("{} -> {}", r.result.source_bytes, r.result.written_bytes)},
              {"relative L2 error of quantised weights", number(whole_error(r.result))}});
  if (!r.scores.empty()) {
    page.heading("Task scores");
    std::vector<std::vector<std::string>> rows;
    for (const QuantizeReport::Scores& s : r.scores)
      rows.push_back({s.eval_name, fmt::format("{:.3f}", s.before), fmt::format("{:.3f}", s.after)});
    page.table({"questions", "before", "after"}, rows);
  }
  if (r.predictions) {
    page.heading("Predictions, before and after");
    page.table({"over the calibration text", "value"}, prediction_rows(*r.predictions));
  }
  page.heading("Weights, layer by layer");
  std::set<int64_t> layers;
  std::map<std::string, std::map<int64_t, double>> projections;
  for (const ProjectionError& e : r.result.errors) {
    layers.insert(e.layer);
    projections[e.projection][e.layer] = e.weights.relative_l2();
  }
  std::vector<std::string> labels, columns = {"layer"};
  for (const int64_t layer : layers) labels.push_back(std::to_string(layer));
  std::vector<HtmlPage::Series> series;
  std::vector<std::vector<std::string>> rows;
  for (const std::string& label : labels) rows.push_back({label});
  for (const auto& [name, errors] : projections) {
    columns.push_back(name);
    series.push_back({name, {}});
    size_t row = 0;
    for (const int64_t layer : layers) {
      const auto found = errors.find(layer);
      series.back().values.push_back(found == errors.end() ? NAN : found->second);
      rows[row++].push_back(found == errors.end() ? "" : number(found->second));
    }
  }
  page.line_plot("Relative L2 error of the weights, by layer", labels, series);
  page.table(columns, rows);
  return page.text();
}

void print(const QuantizeReport& r) {
  fmt::print("wrote {}: {} ({}), {} modules, {} -> {} bytes, relative L2 error of quantised weights {:.4g}\n",
             r.folder, r.format, r.result.dialect, r.result.num_modules, r.result.source_bytes,
             r.result.written_bytes, whole_error(r.result));
  if (r.predictions)
    for (const auto& row : prediction_rows(*r.predictions)) fmt::print("  {}: {}\n", row[0], row[1]);
  for (const QuantizeReport::Scores& s : r.scores)
    fmt::print("  {}: {:.3f} before, {:.3f} after\n", s.eval_name, s.before, s.after);
}

Result<std::vector<double>> score_model(const std::string& model_path, int threads,
                                        const std::vector<QuestionOptions>& sets) {
  EngineConfig config;
  config.model_path = model_path;
  config.device = "cpu";
  config.threads = threads;
  config.weight_cache_dir = "none";
  config.disable_autotune = true;
  config.allow_unused_tensors = true;  // `fp4moe quantize` has already checked these tensors
  FP4MOE_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine, Engine::make(config));
  FP4MOE_ASSIGN_OR_RETURN(const std::unique_ptr<Server> server, Server::make({.port = 0}));
  server->set_engine(*engine);
  std::vector<double> scores;
  for (const QuestionOptions& questions : sets) {
    FP4MOE_ASSIGN_OR_RETURN(const double score,
                            score_server("http://127.0.0.1:" + std::to_string(server->port()), questions));
    scores.push_back(score);
  }
  return scores;
}

}  // namespace fp4moe
