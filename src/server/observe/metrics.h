// Prometheus metrics: the engine's counters and gauges, and the server's own.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "fp4moe/engine.h"

namespace fp4moe {

// Cumulative histogram of seconds. Thread-safe.
class Histogram {
 public:
  static constexpr std::array<double, 18> kBounds = {
      0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 1, 2, 5, 10, 30, 60, 300};
  void observe(double seconds, int64_t times = 1);
  // The lines after "# HELP" and "# TYPE".
  std::string print(const std::string& name, const std::string& labels) const;

 private:
  std::array<std::atomic<int64_t>, kBounds.size() + 1> counts_{};  // the last counts values above all bounds
  std::atomic<double> sum_{0};
};

struct Metrics {
  static constexpr size_t kStatuses = 600;

  Histogram time_to_first_token, inter_token_latency, e2e_request_latency;
  std::array<std::atomic<int64_t>, kStatuses> responses{};  // by HTTP status
  std::atomic<double> startup_seconds{0};
};

// A snapshot of the HTTP server.
struct HttpGauges {
  int64_t open_connections = 0;
  int64_t buffered_bytes = 0;  // memory of requests not yet submitted to the engine
};

// Prometheus' text format, with SGLang's names after `prefix`; process metrics have no prefix.
std::string print_metrics(const Metrics& metrics, const ModelInfo& info, const EngineStats& stats,
                          const HttpGauges& http, const std::string& prefix);

}  // namespace fp4moe
