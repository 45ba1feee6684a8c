// The metrics of a load run, with the labels and JSON keys of SGLang's bench_serving.
#pragma once

#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "bench/serving_load.h"

namespace fp4moe {

// Percentiles are interpolated linearly; stddev is that of the population. All values are 0 for an empty
// list.
struct Summary {
  double mean = 0, median = 0, stddev = 0, p90 = 0, p95 = 0, p99 = 0, max = 0;
};
Summary summarise(std::vector<double> values);

struct ServingReport {
  double duration = 0;  // seconds
  int64_t completed = 0, failed = 0;
  int64_t total_input = 0, total_output = 0;  // tokens of completed requests
  int64_t counted_pieces = 0;                 // responses without usage, whose text pieces were counted
  int64_t unknown_inputs = 0;                 // responses with unknown prompt length, which counts as 0
  int64_t short_outputs = 0;                  // responses whose usage has fewer output tokens than requested
  double concurrency = 0;                     // mean number of requests in flight
  bool has_first_text = false;                // at least one response was streamed
  Summary e2e_ms, ttft_ms, tpot_ms, itl_ms;
};

// Prompt tokens (-1: unknown) and requested output tokens (0: any number) of one request.
struct AskedTokens {
  int64_t prompt = -1, output = 0;
};
ServingReport make_serving_report(const LoadRun& run, const std::vector<AskedTokens>& asked);

// Returns the metrics under SGLang's keys, without arguments and details. Streaming metrics are null if
// nothing was streamed.
nlohmann::ordered_json to_json(const ServingReport& report);
// Prints the lines from "Successful requests:" up to the closing rule.
void print_report(FILE* file, const ServingReport& report);

}  // namespace fp4moe
