#include "server/metrics.h"

#include <algorithm>
#include <cstdio>

namespace fp4moe {

namespace {

std::string number(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.10g", value);
  return text;
}

std::string escape(const std::string& label) {
  std::string out;
  for (const char c : label) {
    if (c == '\\' || c == '"') out += '\\';
    if (c == '\n') {
      out += "\\n";
    } else {
      out += c;
    }
  }
  return out;
}

std::string head(const std::string& name, const char* type) { return "# TYPE " + name + " " + type + "\n"; }

}  // namespace

void Histogram::observe(double seconds, int64_t times) {
  const auto bound = std::lower_bound(kBounds.begin(), kBounds.end(), seconds);
  counts_[static_cast<size_t>(bound - kBounds.begin())].fetch_add(times, std::memory_order_relaxed);
  sum_.fetch_add(seconds * static_cast<double>(times), std::memory_order_relaxed);
}

std::string Histogram::print(const std::string& name, const std::string& labels) const {
  std::string text = head(name, "histogram");
  int64_t below = 0;
  for (size_t i = 0; i < counts_.size(); ++i) {
    below += counts_[i].load(std::memory_order_relaxed);
    const std::string bound = i < kBounds.size() ? number(kBounds[i]) : "+Inf";
    text += name + "_bucket{" + labels + ",le=\"" + bound + "\"} " + std::to_string(below) + "\n";
  }
  text += name + "_sum{" + labels + "} " + number(sum_.load(std::memory_order_relaxed)) + "\n";
  return text + name + "_count{" + labels + "} " + std::to_string(below) + "\n";
}

std::string print_metrics(const Metrics& metrics, const ModelInfo& info, const EngineStats& stats,
                          const std::string& prefix) {
  const double capacity = static_cast<double>(std::max<int64_t>(stats.max_total_num_tokens, 1));
  const double used = static_cast<double>(stats.num_used_tokens);
  struct Sample {
    const char* name;
    const char* type;
    double value;
  };
  const Sample samples[] = {
      {"num_running_reqs", "gauge", static_cast<double>(stats.num_running_reqs)},
      {"num_queue_reqs", "gauge", static_cast<double>(stats.num_queue_reqs)},
      {"num_used_tokens", "gauge", used},
      {"max_total_num_tokens", "gauge", static_cast<double>(stats.max_total_num_tokens)},
      {"token_usage", "gauge", used / capacity},
      {"gen_throughput", "gauge", stats.gen_throughput},
      {"prompt_tokens_total", "counter", static_cast<double>(stats.prompt_tokens_total)},
      {"generation_tokens_total", "counter", static_cast<double>(stats.generation_tokens_total)},
      {"num_requests_total", "counter", static_cast<double>(stats.num_requests_total)},
      {"num_aborted_requests_total", "counter", static_cast<double>(stats.num_aborted_requests_total)},
      {"num_failed_requests_total", "counter", static_cast<double>(stats.num_failed_requests_total)},
      {"weight_load_duration_seconds", "gauge", stats.load_seconds},
      {"weight_memory_usage_gb", "gauge", static_cast<double>(info.weight_bytes) / 1e9},
      {"kv_cache_memory_usage_gb", "gauge", static_cast<double>(info.kv_bytes) / 1e9},
      {"uptime_seconds", "gauge", stats.uptime_seconds},
  };
  const std::string labels = "model_name=\"" + escape(info.name) + "\"";
  std::string text;
  for (const Sample& s : samples) {
    const std::string name = prefix + s.name;
    text += head(name, s.type) + name + "{" + labels + "} " + number(s.value) + "\n";
  }
  text += metrics.time_to_first_token.print(prefix + "time_to_first_token_seconds", labels);
  text += metrics.inter_token_latency.print(prefix + "inter_token_latency_seconds", labels);
  text += metrics.e2e_request_latency.print(prefix + "e2e_request_latency_seconds", labels);
  return text;
}

}  // namespace fp4moe
