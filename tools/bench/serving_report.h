// The metrics of a load run, with the labels and JSON keys of SGLang's bench_serving.
#pragma once

#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "bench/serving_load.h"

namespace fp4moe {

// Percentiles interpolate linearly; stddev is the population's. All 0 for an empty list.
struct Summary {
  double mean = 0, median = 0, stddev = 0, p90 = 0, p95 = 0, p99 = 0, max = 0;
};
Summary summarise(std::vector<double> values);

struct ServingReport {
  double duration = 0;  // seconds
  int64_t completed = 0, failed = 0;
  int64_t total_input = 0, total_output = 0;  // tokens of completed requests
  int64_t counted_pieces = 0;                 // completed without usage: text pieces were counted
  int64_t unknown_inputs = 0;                 // completed with unknown prompt length, counted as 0
  int64_t short_outputs = 0;                  // completed with fewer output tokens (by usage) than requested
  double concurrency = 0;                     // requests in flight on average
  bool has_first_text = false;                // at least one response was streamed
  Summary e2e_ms, ttft_ms, tpot_ms, itl_ms;
};

// The tokens of a prompt (-1: unknown), and the requested output tokens (0: any number).
struct AskedTokens {
  int64_t prompt = -1, output = 0;
};
ServingReport make_serving_report(const LoadRun& run, const std::vector<AskedTokens>& asked);

// With SGLang's keys; null for streaming metrics if nothing was streamed. Excludes arguments and details.
nlohmann::ordered_json to_json(const ServingReport& report);
// The lines between "Successful requests:" and the closing rule.
void print_report(FILE* file, const ServingReport& report);

}  // namespace fp4moe
