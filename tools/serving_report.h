// The figures of a load, under the labels and JSON keys of SGLang's bench_serving.
#pragma once

#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "serving_load.h"

namespace fp4moe {

// Percentiles lie between values linearly, the deviation is the population's; all 0 for no values.
struct Summary {
  double mean = 0, median = 0, stddev = 0, p90 = 0, p95 = 0, p99 = 0, max = 0;
};
Summary summarise(std::vector<double> values);

struct ServingReport {
  double duration = 0;  // seconds
  int64_t completed = 0, failed = 0;
  int64_t total_input = 0, total_output = 0;  // tokens of the completed
  int64_t counted_pieces = 0;                 // of the completed: had no usage, text pieces were counted
  int64_t unknown_inputs = 0;                 // of the completed: neither usage nor ids tell; counted as 0
  int64_t short_answers = 0;                  // of the completed: fewer tokens by usage than asked for
  double concurrency = 0;                     // requests in flight on average
  bool has_first_text = false;                // some answer was streamed
  Summary e2e_ms, ttft_ms, tpot_ms, itl_ms;
};

// The tokens of a prompt (-1: unknown), and how many the answer is to have (0: any number).
struct AskedTokens {
  int64_t prompt = -1, answer = 0;
};
ServingReport make_serving_report(const LoadRun& run, const std::vector<AskedTokens>& asked);

// SGLang's keys; null where nothing was streamed. Without the arguments and details.
nlohmann::ordered_json to_json(const ServingReport& report);
// The lines between "Successful requests:" and the closing rule.
void print_report(FILE* file, const ServingReport& report);

}  // namespace fp4moe
