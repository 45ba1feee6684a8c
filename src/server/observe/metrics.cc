#include "server/observe/metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <sstream>

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

std::string head(const std::string& name, const char* type, const std::string& help) {
  return "# HELP " + name + " " + help + "\n# TYPE " + name + " " + type + "\n";
}

struct Sample {
  const char* name;
  const char* type;
  const char* help;
  double value;
};

// Gauges of the KV pages; those of layers with a sliding window have SGLang's prefix swa_.
void add_page_samples(const EngineStats& stats, std::vector<Sample>& samples) {
  const auto real = [](int64_t value) { return static_cast<double>(value); };
  const double capacity = real(std::max<int64_t>(stats.max_total_num_tokens, 1));
  const double page_size = capacity / real(std::max<int64_t>(stats.num_pages, 1));
  const Sample of_pages[] = {
      {"num_used_tokens", "gauge", "Token slots of the KV pool in use.", real(stats.num_used_tokens)},
      {"kv_used_tokens", "gauge", "Newer name of num_used_tokens.", real(stats.num_used_tokens)},
      {"kv_evictable_tokens", "gauge", "Cached tokens of past requests, evictable.",
       real(stats.num_cached_pages) * page_size},
      {"kv_available_tokens", "gauge", "Free token slots of the KV pool.",
       real(stats.num_free_pages) * page_size},
      {"num_pages", "gauge", "Pages of the KV pool.", real(stats.num_pages)},
      {"swa_max_total_num_tokens", "gauge",
       "Capacity of the pages of layers with a sliding window, in tokens; 0: they hold all tokens.",
       real(stats.num_window_pages) * page_size},
      {"swa_num_used_tokens", "gauge", "Token slots of these pages in use.",
       real(stats.num_used_window_pages) * page_size},
      {"swa_evictable_tokens", "gauge", "Token slots of these pages that are cached for reuse.",
       real(stats.num_cached_window_pages) * page_size},
      {"swa_token_usage", "gauge", "Used share of these pages, 0 to 1.",
       real(stats.num_used_window_pages) / real(std::max<int64_t>(stats.num_window_pages, 1))},
      {"mamba_num_slots", "gauge", "Slots for states of recurrent layers; 0: the model has none.",
       real(stats.num_state_slots)},
      {"mamba_num_used_slots", "gauge", "Slots of running requests.", real(stats.num_used_state_slots)},
      {"mamba_num_snapshots", "gauge", "Slots with snapshots for reused prefixes, evictable.",
       real(stats.num_state_snapshots)},
      {"mamba_usage", "gauge", "Share of the slots that running requests use, 0 to 1.",
       real(stats.num_used_state_slots) / real(std::max<int64_t>(stats.num_state_slots, 1))},
      {"num_leaked_pages", "gauge",
       "Pages and state slots that are neither in use, cached nor free; always 0 unless there is a bug.",
       real(stats.num_leaked_pages)},
      {"max_total_num_tokens", "gauge", "Capacity of the KV pool in tokens.",
       real(stats.max_total_num_tokens)},
      {"token_usage", "gauge", "Used share of the KV pool, 0 to 1.", real(stats.num_used_tokens) / capacity},
  };
  samples.insert(samples.end(), std::begin(of_pages), std::end(of_pages));
}

// Returns a counter per position from 0 on; empty without positions.
std::string print_by_position(const std::string& name, const std::string& help, const std::string& labels,
                              const std::vector<int64_t>& counts) {
  std::string text = counts.empty() ? "" : head(name, "counter", help);
  for (size_t i = 0; i < counts.size(); ++i)
    text +=
        name + "{" + labels + ",position=\"" + std::to_string(i) + "\"} " + std::to_string(counts[i]) + "\n";
  return text;
}

// Since startup.
void add_speculation_samples(const EngineStats& stats, std::vector<Sample>& samples) {
  const auto real = [](int64_t value) { return static_cast<double>(value); };
  const double proposed = std::max(real(stats.spec_proposed_drafts_total), 1.0);
  const double correct = real(stats.spec_correct_drafts_total);
  const double max_drafts = real(std::ssize(stats.spec_correct_by_position));
  const Sample of_drafts[] = {
      {"spec_accept_length", "gauge", "Mean tokens per request and decode step: correct drafts and one more.",
       stats.spec_accept_length()},
      {"spec_accept_rate", "gauge", "Fraction of the draft tokens that were correct, 0 to 1.",
       correct / proposed},
      {"spec_verify_calls_total", "counter", "Decode steps, summed over the requests in each.",
       real(stats.spec_verify_calls_total)},
      {"spec_proposed_drafts_total", "counter", "Draft tokens computed.",
       real(stats.spec_proposed_drafts_total)},
      {"spec_correct_drafts_total", "counter", "Draft tokens that were correct.", correct},
      {"spec_num_steps", "gauge", "Most draft tokens of a request in a step.", max_drafts},
      {"spec_num_draft_tokens", "gauge", "Most rows of a request in a step: drafts and one more.",
       max_drafts + 1},
  };
  samples.insert(samples.end(), std::begin(of_drafts), std::end(of_drafts));
}

// Since startup; the imbalances are those of the last rebalance.
void add_placement_samples(const ExpertMoveTotals& moves, std::vector<Sample>& samples) {
  const auto real = [](int64_t value) { return static_cast<double>(value); };
  const Sample of_moves[] = {
      {"eplb_rebalances_total", "counter", "Moves of experts between the ranks by their loads.",
       real(moves.num_rebalances)},
      {"eplb_moved_experts_total", "counter", "Physical experts that got other weights, over all layers.",
       real(moves.num_experts)},
      {"eplb_moved_bytes_total", "counter", "Bytes of these weights.", real(moves.num_bytes)},
      {"eplb_imbalance_before", "gauge",
       "The busiest rank's rows divided by the mean, until the last rebalance; 1 is even.",
       moves.imbalance_before},
      {"eplb_imbalance_after", "gauge", "The same for the same rows with the placement that was chosen then.",
       moves.imbalance_after},
  };
  samples.insert(samples.end(), std::begin(of_moves), std::end(of_moves));
}

// Returns the lines of a histogram after "# HELP" and "# TYPE". `counts`: values up to each bound and above
// the bound before; the last element: above all bounds.
std::string print_buckets(const std::string& name, const std::string& labels, std::span<const double> bounds,
                          std::span<const int64_t> counts, double sum) {
  std::string text;
  int64_t below = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    below += counts[i];
    const std::string bound = i < bounds.size() ? number(bounds[i]) : "+Inf";
    text += name + "_bucket{" + labels + ",le=\"" + bound + "\"} " + std::to_string(below) + "\n";
  }
  text += name + "_sum{" + labels + "} " + number(sum) + "\n";
  return text + name + "_count{" + labels + "} " + std::to_string(below) + "\n";
}

std::vector<Sample> engine_samples(const ModelInfo& info, const EngineStats& stats) {
  const auto real = [](int64_t value) { return static_cast<double>(value); };
  return {
      {"num_running_reqs", "gauge", "Requests in the batch.", real(stats.num_running_reqs)},
      {"num_queue_reqs", "gauge", "Requests waiting for a slot in the batch.", real(stats.num_queue_reqs)},
      {"num_grammar_queue_reqs", "gauge", "Requests waiting for their grammar or its next mask.",
       real(stats.num_grammar_queue_reqs)},
      {"gen_throughput", "gauge", "Generated tokens per second, over the last seconds.",
       stats.gen_throughput},
      {"prompt_tokens_total", "counter", "Prompt tokens.", real(stats.prompt_tokens_total)},
      {"cached_tokens_total", "counter", "Prompt tokens found in the prefix cache.",
       real(stats.cached_tokens_total)},
      {"cache_hit_rate", "gauge", "Fraction of the latest prompts' tokens found in the prefix cache, 0 to 1.",
       stats.cache_hit_rate},
      {"generation_tokens_total", "counter", "Tokens generated.", real(stats.generation_tokens_total)},
      {"num_requests_total", "counter", "Finished requests, including aborted and failed ones.",
       real(stats.num_requests_total)},
      {"num_aborted_requests_total", "counter", "Aborted requests.", real(stats.num_aborted_requests_total)},
      {"num_failed_requests_total", "counter", "Failed requests.", real(stats.num_failed_requests_total)},
      {"num_timed_out_requests_total", "counter", "Requests that failed because a time limit passed.",
       real(stats.num_timed_out_requests_total)},
      {"num_prefill_inflight_queue_reqs", "gauge",
       "Prefill node: requests whose KV pages wait to be fetched.", real(stats.num_held_reqs)},
      {"num_decode_prealloc_queue_reqs", "gauge", "Decode node: requests waiting for their first token.",
       real(stats.num_awaited_reqs)},
      {"num_decode_transfer_queue_reqs", "gauge", "Decode node: requests waiting for their KV pages.",
       real(stats.num_transferring_reqs)},
      {"kv_transfer_bytes_total", "counter",
       "Bytes of KV pages and states sent to decode nodes or received from prefill nodes.",
       real(stats.kv_transfer_bytes_total)},
      {"kv_transfer_seconds_total", "counter",
       "Seconds from the request for a prompt's KV pages to the last of them or of its state, less those "
       "before they were computed (prefill node) or before the first token (decode node).",
       stats.kv_transfer_seconds_total},
      {"kv_transfer_copy_seconds_total", "counter",
       "Seconds of copies between KV pages or states and the buffers of the connections.",
       stats.kv_transfer_copy_seconds_total},
      {"new_token_ratio", "gauge",
       "Fraction of outstanding output tokens for which admission reserves KV pages.", stats.new_token_ratio},
      {"num_retracted_reqs", "gauge", "Times a request gave up its KV pages and was requeued.",
       real(stats.num_retracted_reqs)},
      {"num_retracted_requests_total", "counter", "Times a request gave up its KV pages and was requeued.",
       real(stats.num_retracted_reqs)},
      {"weight_load_duration_seconds", "gauge", "Time to load the weights, in seconds.", stats.load_seconds},
      {"weight_memory_usage_gb", "gauge", "Memory of the weights, in GB.", real(info.weight_bytes) / 1e9},
      {"kv_cache_memory_usage_gb", "gauge", "Memory of the KV pool, in GB.", real(info.kv_bytes) / 1e9},
      {"uptime_seconds", "gauge", "Seconds since the engine was created.", stats.uptime_seconds},
  };
}

// Process metrics under the names of Prometheus' client libraries.
std::vector<Sample> process_samples() {
  std::ifstream stat("/proc/self/stat"), statm("/proc/self/statm"), system("/proc/stat");
  double virtual_pages = 0, resident_pages = 0;
  statm >> virtual_pages >> resident_pages;
  // Count fields after the command name in parentheses, which may contain spaces: state is the 1st, utime,
  // stime and starttime the 12th, 13th and 20th.
  std::string text((std::istreambuf_iterator<char>(stat)), {});
  std::istringstream fields(text.substr(std::min(text.rfind(')') + 1, text.size())));
  std::array<std::string, 20> field;
  for (std::string& f : field) fields >> f;
  double boot_seconds = 0;
  for (std::string line; std::getline(system, line);) {
    if (line.rfind("btime ", 0) == 0) boot_seconds = std::atof(line.c_str() + 6);
  }
  const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  const auto page = static_cast<double>(sysconf(_SC_PAGESIZE));
  rlimit descriptors{};
  getrlimit(RLIMIT_NOFILE, &descriptors);
  std::error_code ignored;
  const auto files = std::filesystem::directory_iterator("/proc/self/fd", ignored);
  return {
      {"process_cpu_seconds_total", "counter", "CPU time, user and system, in seconds.",
       (std::atof(field[11].c_str()) + std::atof(field[12].c_str())) / ticks},
      {"process_resident_memory_bytes", "gauge", "Resident memory in bytes.", resident_pages * page},
      {"process_virtual_memory_bytes", "gauge", "Virtual memory in bytes.", virtual_pages * page},
      {"process_open_fds", "gauge", "Open file descriptors.",
       static_cast<double>(std::distance(begin(files), end(files)))},
      {"process_max_fds", "gauge", "Maximum number of open file descriptors.",
       static_cast<double>(descriptors.rlim_cur)},
      {"process_start_time_seconds", "gauge", "Start time in seconds since the Unix epoch.",
       boot_seconds + std::atof(field[19].c_str()) / ticks},
  };
}

}  // namespace

void Histogram::observe(double seconds, int64_t times) {
  const auto bound = std::lower_bound(kBounds.begin(), kBounds.end(), seconds);
  counts_[static_cast<size_t>(bound - kBounds.begin())].fetch_add(times, std::memory_order_relaxed);
  sum_.fetch_add(seconds * static_cast<double>(times), std::memory_order_relaxed);
}

std::string Histogram::print(const std::string& name, const std::string& labels) const {
  std::array<int64_t, kBounds.size() + 1> counts{};
  std::ranges::transform(counts_, counts.begin(),
                         [](const auto& count) { return count.load(std::memory_order_relaxed); });
  return print_buckets(name, labels, kBounds, counts, sum_.load(std::memory_order_relaxed));
}

std::string print_metrics(const Metrics& metrics, const ModelInfo& info, const EngineStats& stats,
                          const HttpGauges& http, const std::string& prefix) {
  const std::string labels = "model_name=\"" + escape(info.name) + "\"";
  std::string text;
  std::vector<Sample> samples = engine_samples(info, stats);
  add_page_samples(stats, samples);
  if (!info.speculative_algorithm.empty()) add_speculation_samples(stats, samples);
  if (info.moves_experts) add_placement_samples(stats.expert_moves, samples);
  samples.push_back({"startup_time_seconds", "gauge",
                     "Seconds from the HTTP server's start until the engine is ready.",
                     metrics.startup_seconds.load()});
  samples.push_back({"num_open_connections", "gauge", "Open HTTP connections.",
                     static_cast<double>(http.open_connections)});
  samples.push_back({"http_buffered_bytes", "gauge",
                     "Memory of requests not yet handed to the engine, in bytes.",
                     static_cast<double>(http.buffered_bytes)});
  for (const Sample& s : samples) {
    const std::string name = prefix + s.name;
    text += head(name, s.type, s.help) + name + "{" + labels + "} " + number(s.value) + "\n";
  }
  text += print_by_position(prefix + "spec_proposed_drafts_by_position_total",
                            "Draft tokens computed, by position in the step.", labels,
                            stats.spec_proposed_by_position);
  text += print_by_position(prefix + "spec_correct_drafts_by_position_total",
                            "Draft tokens that were correct, by position in the step.", labels,
                            stats.spec_correct_by_position);
  const std::string responses = prefix + "http_responses_total";
  text += head(responses, "counter", "HTTP responses started, by status code.");
  for (size_t status = 0; status < metrics.responses.size(); ++status) {
    if (const int64_t count = metrics.responses[status].load(); count > 0)
      text += responses + "{" + labels + ",status_code=\"" + std::to_string(status) + "\"} " +
              std::to_string(count) + "\n";
  }
  const struct {
    const char* name;
    const char* help;
    const Histogram& histogram;
  } histograms[] = {
      {"time_to_first_token_seconds", "Seconds from a request's arrival to its first token.",
       metrics.time_to_first_token},
      {"inter_token_latency_seconds", "Seconds between two tokens of a request.",
       metrics.inter_token_latency},
      {"e2e_request_latency_seconds", "Seconds from a request's arrival to its last token.",
       metrics.e2e_request_latency},
  };
  for (const auto& h : histograms)
    text += head(prefix + h.name, "histogram", h.help) + h.histogram.print(prefix + h.name, labels);
  if (const std::string pauses = prefix + "eplb_rebalance_seconds"; info.moves_experts)
    text += head(pauses, "histogram", "Seconds in which no step ran because experts moved.") +
            print_buckets(pauses, labels, ExpertMoveTotals::kBounds, stats.expert_moves.by_seconds,
                          stats.expert_moves.seconds);
  for (const Sample& s : process_samples())
    text += head(s.name, s.type, s.help) + s.name + " " + number(s.value) + "\n";
  return text;
}

}  // namespace fp4moe
