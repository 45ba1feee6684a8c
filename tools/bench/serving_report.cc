#include "bench/serving_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace fp4moe {

namespace {

constexpr int kWidth = 50;

void line(FILE* file, const char* label, const std::string& value) {
  fmt::print(file, "{:<40} {:<10}\n", label, value);
}
void line(FILE* file, const char* label, double value) { line(file, label, fmt::format("{:.2f}", value)); }
void line(FILE* file, const char* label, int64_t value) { line(file, label, std::to_string(value)); }

double per_second(int64_t count, const ServingReport& report) {
  return report.duration > 0 ? static_cast<double>(count) / report.duration : 0;
}

void print_summary(FILE* file, const char* title, const char* name, const Summary& s) {
  fmt::print(file, "{:-^{}}\n", title, kWidth);
  const std::pair<const char*, double> rows[] = {{"Mean", s.mean}, {"Median", s.median}, {"P90", s.p90},
                                                 {"P95", s.p95},   {"P99", s.p99},       {"Max", s.max}};
  for (const auto& [row, value] : rows) line(file, fmt::format("{} {} (ms):", row, name).c_str(), value);
}

void add_summary(nlohmann::ordered_json& result, const std::string& name, const Summary& s, bool is_known) {
  const std::pair<const char*, double> values[] = {{"mean", s.mean}, {"median", s.median}, {"std", s.stddev},
                                                   {"p90", s.p90},   {"p95", s.p95},       {"p99", s.p99},
                                                   {"max", s.max}};
  for (const auto& [key, value] : values) {
    auto& field = result[fmt::format("{}_{}_ms", key, name)];
    if (is_known) field = value;
  }
}

}  // namespace

Summary summarise(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const auto count = static_cast<double>(values.size());
  const auto percentile = [&](double part) {
    const double at = part * (count - 1);
    const auto below = static_cast<size_t>(at);
    const size_t above = std::min(below + 1, values.size() - 1);
    return values[below] + (values[above] - values[below]) * (at - std::floor(at));
  };
  Summary s;
  s.mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
  double squares = 0;
  for (const double v : values) squares += (v - s.mean) * (v - s.mean);
  s.stddev = std::sqrt(squares / count);
  s.median = percentile(0.5);
  s.p90 = percentile(0.9);
  s.p95 = percentile(0.95);
  s.p99 = percentile(0.99);
  s.max = values.back();
  return s;
}

ServingReport make_serving_report(const LoadRun& run, const std::vector<AskedTokens>& asked) {
  ServingReport report;
  report.duration = run.seconds;
  std::vector<double> e2e, ttft, tpot, itl;
  for (size_t i = 0; i < run.responses.size(); ++i) {
    const ServingResponse& response = run.responses[i];
    if (!response.error.ok()) {
      ++report.failed;
      continue;
    }
    ++report.completed;
    const int64_t prompt = response.has_usage ? response.prompt_tokens : asked[i].prompt;
    report.total_input += std::max<int64_t>(prompt, 0);
    report.total_output += response.output_tokens;
    report.unknown_inputs += prompt < 0;
    report.counted_pieces += !response.has_usage;
    report.short_outputs += response.has_usage && response.output_tokens < asked[i].output;
    e2e.push_back(1e3 * response.latency_s);
    if (response.first_text_s < 0) continue;
    ttft.push_back(1e3 * response.first_text_s);
    if (response.output_tokens > 1)
      tpot.push_back(1e3 * (response.latency_s - response.first_text_s) /
                     static_cast<double>(response.output_tokens - 1));
    for (const double gap : response.gaps_s) itl.push_back(1e3 * gap);
  }
  report.has_first_text = !ttft.empty();
  if (run.seconds > 0) report.concurrency = std::accumulate(e2e.begin(), e2e.end(), 0.0) / 1e3 / run.seconds;
  report.e2e_ms = summarise(std::move(e2e));
  report.ttft_ms = summarise(std::move(ttft));
  report.tpot_ms = summarise(std::move(tpot));
  report.itl_ms = summarise(std::move(itl));
  return report;
}

nlohmann::ordered_json to_json(const ServingReport& r) {
  nlohmann::ordered_json result = {{"duration", r.duration},
                                   {"completed", r.completed},
                                   {"failed", r.failed},
                                   {"total_input_tokens", r.total_input},
                                   {"total_output_tokens", r.total_output},
                                   {"counted_by_usage", r.completed - r.counted_pieces},
                                   {"counted_by_pieces", r.counted_pieces},
                                   {"unknown_inputs", r.unknown_inputs},
                                   {"short_outputs", r.short_outputs},
                                   {"request_throughput", per_second(r.completed, r)},
                                   {"input_throughput", per_second(r.total_input, r)},
                                   {"output_throughput", per_second(r.total_output, r)},
                                   {"total_throughput", per_second(r.total_input + r.total_output, r)}};
  add_summary(result, "e2e_latency", r.e2e_ms, r.completed > 0);
  add_summary(result, "ttft", r.ttft_ms, r.has_first_text);
  add_summary(result, "tpot", r.tpot_ms, r.has_first_text);
  add_summary(result, "itl", r.itl_ms, r.has_first_text);
  result["concurrency"] = r.concurrency;
  return result;
}

void print_report(FILE* file, const ServingReport& r) {
  line(file, "Successful requests:", r.completed);
  if (r.failed > 0) line(file, "Failed requests:", r.failed);
  line(file, "Benchmark duration (s):", r.duration);
  line(file, "Total input tokens:", r.total_input);
  line(file, "Total generated tokens:", r.total_output);
  line(file, "Counted by:",
       r.counted_pieces == 0 ? "the server's usage"
                             : fmt::format("pieces of text in {} of {} responses, which had no usage",
                                           r.counted_pieces, r.completed));
  if (r.unknown_inputs > 0) line(file, "Prompts of unknown length, counted as 0:", r.unknown_inputs);
  if (r.short_outputs > 0) line(file, "Outputs shorter than requested:", r.short_outputs);
  line(file, "Request throughput (req/s):", per_second(r.completed, r));
  line(file, "Input token throughput (tok/s):", per_second(r.total_input, r));
  line(file, "Output token throughput (tok/s):", per_second(r.total_output, r));
  line(file, "Total token throughput (tok/s):", per_second(r.total_input + r.total_output, r));
  line(file, "Concurrency:", r.concurrency);
  print_summary(file, "End-to-End Latency", "E2E Latency", r.e2e_ms);
  if (!r.has_first_text) return;
  print_summary(file, "Time to First Token", "TTFT", r.ttft_ms);
  print_summary(file, "Time per Output Token (excl. 1st token)", "TPOT", r.tpot_ms);
  print_summary(file, "Inter-Token Latency", "ITL", r.itl_ms);
}

}  // namespace fp4moe
