// The accuracy report of `fp4moe quantize`.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "eval/eval_questions.h"
#include "eval/text_pass.h"
#include "io/write/quantize_checkpoint.h"

namespace fp4moe {

struct QuantizeReport {
  std::string source, folder, format, search, calibration;  // calibration: path of the texts, or empty
  QuantizeResult result;
  std::optional<PredictionReport> predictions;
  struct Scores {
    std::string eval_name;
    double before = 0, after = 0;
  };
  std::vector<Scores> scores;
};

nlohmann::ordered_json to_json(const QuantizeReport& report);
std::string to_html(const QuantizeReport& report);
void print(const QuantizeReport& report);

// Scores the model on each question set, through an engine and server in this process on a free loopback
// port.
Result<std::vector<double>> score_model(const std::string& model_path, int threads,
                                        const std::vector<QuestionOptions>& sets);

}  // namespace fp4moe
