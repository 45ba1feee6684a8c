// fp4moe bench latency: prefill and decode speed of the engine, in llama-bench's format.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "bench/bench_limit.h"
#include "bench/bench_spread.h"
#include "bench/busy_processes.h"
#include "bench/random_drafts.h"
#include "flag_checks.h"
#include "fp4moe/config.h"
#include "fp4moe/engine.h"
#include "subcommand.h"

namespace fp4moe {

namespace {

using Clock = std::chrono::steady_clock;
using json = nlohmann::ordered_json;

struct BenchOptions {
  EngineConfig engine{.disable_radix_cache = true};  // every prompt must be computed
  std::vector<int64_t> prompt = {512}, generate = {128}, depth = {0}, batch = {1};
  std::vector<int> threads = {0};
  int repeat = 5;
  int busy = 0;
  int64_t cold_mib = 0;
  bool no_warmup = false;
  std::string output = "md";
  bool has_random_drafts = false;  // with a synthetic acceptance and no drafter

  bool has_drafts() const { return engine.speculative_algorithm != "none"; }
  bool is_synthetic() const { return engine.speculative_synthetic_acceptance >= 0; }
};

// One row of the table. Each request of a batch either has n_prompt prompt ids, or generates n_gen tokens
// after max(n_depth, 1) ids.
struct Case {
  int threads;
  int64_t batch, n_prompt, n_gen, n_depth = 0;
  int busy = 0;  // number of busy processes that run at the same time

  int64_t num_ids() const { return std::max<int64_t>(n_gen > 0 ? n_depth : n_prompt, 1); }

  std::string name() const {
    std::string test = n_gen > 0 ? "tg" + std::to_string(n_gen) : "pp" + std::to_string(n_prompt);
    if (batch > 1) test += " x" + std::to_string(batch);
    if (n_depth > 0) test += " @ d" + std::to_string(n_depth);
    return busy > 0 ? test + " beside " + std::to_string(busy) + " busy" : test;
  }
};

struct Measured {
  Case what;
  std::vector<double> rates;  // tokens per second, one per repeat
  int64_t num_together = 0;   // requests that ran for the whole measured time of the last repeat
  int64_t num_ahead = 0;      // extra tokens per request; see Batch
  // CPU only; 0 if no limit is known. read_gbps: the faster of the read tests before and after; limit: the
  // tokens per second that this rate and the dot products allow.
  double read_gbps = 0, limit = 0;
  double accept_length = 0;  // tokens per request and decode step; 0: no speculative decoding
  double of_alone = 1;       // median rate relative to the same test without busy processes
  double of_plain = 0;       // median rate relative to the same test without drafts; 0: unknown

  double median_rate() const { return spread_of(rates).median; }
  double mean() const {
    double sum = 0;
    for (const double rate : rates) sum += rate;
    return sum / static_cast<double>(rates.size());
  }
  double stddev() const {
    if (rates.size() < 2) return 0;
    double sum = 0;
    for (const double rate : rates) sum += (rate - mean()) * (rate - mean());
    return std::sqrt(sum / static_cast<double>(rates.size() - 1));
  }
};

// Runs a batch of equal requests. Prefill is timed from submission to the last request's first token; decode
// from there until batch x n_gen more tokens are generated. Because a step mixes prefill and decode, the
// first requests are already ahead when the timing starts. Every request therefore generates `num_ahead`
// extra tokens, so that all timed steps have the whole batch: as many as steps compute the prompts, and from
// the second run on at least as many as the run before needed. If that is too few, or the KV pool does not
// hold all requests at once, decode is timed until the last request ends or batch x n_gen tokens are
// generated, and num_together() is less than the batch.
//
// All outputs are random if `is_synthetic`, because forced drafts are, and otherwise greedy.
class Batch {
 public:
  Batch(Engine& engine, const Case& c, int64_t num_ahead, bool is_synthetic)
      : engine_(engine), case_(c), num_ahead_(num_ahead), is_synthetic_(is_synthetic) {}

  Result<double> run(uint64_t seed) {
    std::mt19937_64 random(seed);
    const Clock::time_point start = Clock::now();
    int64_t submitted = 0;
    Status refused;
    for (int64_t i = 0; i < case_.batch; ++i) {
      Request request;
      request.input_ids.resize(static_cast<size_t>(case_.num_ids()));
      for (int32_t& id : request.input_ids) id = static_cast<int32_t>(random() % vocabulary());
      request.sampling.temperature = is_synthetic_ ? 1 : 0;
      request.sampling.seed = static_cast<uint64_t>(request.input_ids[0]);  // equal prompts: equal outputs
      request.sampling.ignore_eos = true;
      request.sampling.max_new_tokens = num_new_tokens();
      auto id = engine_.submit(std::move(request), [&](const Delta& delta) { on_delta(delta); });
      if (id.ok()) ++submitted;
      if (!id.ok()) refused = id.status();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    news_.wait(lock, [&] { return ended_ == submitted; });
    if (!refused.ok()) return refused;
    if (!status_.ok()) return status_;
    const Clock::time_point from = case_.n_gen > 0 ? all_started_at_ : start;
    const Clock::time_point to = case_.n_gen > 0 ? timed_until_ : all_started_at_;
    return std::chrono::duration<double>(to - from).count();
  }

  // Prompt tokens or generated tokens in the time that run() returns.
  int64_t num_timed() const { return case_.n_gen == 0 ? case_.batch * case_.n_prompt : num_timed_; }
  // Requests that were still running at the end of that time.
  int64_t num_together() const { return case_.n_gen == 0 ? case_.batch : num_together_; }
  // Maximum, over all requests, of the tokens after the first one when the last request got its first token.
  int64_t most_ahead() const { return most_ahead_; }

 private:
  uint64_t vocabulary() const { return static_cast<uint64_t>(engine_.info().vocab_size); }

  int64_t num_new_tokens() const {
    const int64_t room = engine_.info().context_length - case_.num_ids() - case_.n_gen - 1;
    return case_.n_gen + 1 + std::clamp<int64_t>(room, 0, num_ahead_);
  }

  void on_delta(const Delta& delta) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto made = static_cast<int64_t>(delta.token_ids.size());
    tokens_ += made;
    if (started_ < case_.batch) most_ahead_ = std::max(most_ahead_, delta.completion_tokens - 1);
    if (made > 0 && delta.completion_tokens == made && ++started_ == case_.batch) {
      all_started_at_ = Clock::now();
      tokens_at_start_ = tokens_;
    }
    if (started_ == case_.batch && num_timed_ < case_.batch * case_.n_gen) {
      timed_until_ = Clock::now();
      num_timed_ = tokens_ - tokens_at_start_;
      num_together_ = case_.batch - ended_;
    }
    if (delta.finish_reason == FinishReason::kNone) return;
    if (delta.finish_reason != FinishReason::kLength && status_.ok())
      status_ = internal_error("a request ended early: " + delta.error);
    ++ended_;
    news_.notify_all();
  }

  Engine& engine_;
  const Case case_;
  const int64_t num_ahead_;
  const bool is_synthetic_;
  std::mutex mutex_;
  std::condition_variable news_;
  int64_t started_ = 0, ended_ = 0, tokens_ = 0, tokens_at_start_ = 0, num_timed_ = 0, num_together_ = 0,
          most_ahead_ = 0;
  Clock::time_point all_started_at_, timed_until_;
  Status status_;
};

// Returns the upper limit in tokens per second. Counts a whole prefill as one step, which reads the weights
// once.
double limit_of(const Case& c, const LatencyLimit& limit, double read_gbps) {
  const auto batch = static_cast<double>(c.batch);
  const double tokens = c.n_gen > 0 ? batch : batch * static_cast<double>(c.n_prompt);
  return tokens / limit.step_seconds(tokens, batch, read_gbps);
}

Status run_once(Engine& engine, Measured& m, int repeat, bool is_synthetic) {
  BusyProcesses neighbours;
  Status status = neighbours.start(m.what.busy);
  if (!status.ok()) return status;
  Batch batch(engine, m.what, m.num_ahead, is_synthetic);
  const auto seconds = batch.run(static_cast<uint64_t>(repeat + 1));
  if (!seconds.ok()) return seconds.status().with_context(m.what.name());
  m.num_together = batch.num_together();
  constexpr int64_t kSpare = 2;  // extra tokens: requests do not join at the same step in every run
  if (m.what.n_gen > 0 && m.what.batch > 1) m.num_ahead = std::max(m.num_ahead, batch.most_ahead() + kSpare);
  if (repeat >= 0) m.rates.push_back(static_cast<double>(batch.num_timed()) / *seconds);
  return {};
}

double accept_length(const EngineStats& before, const EngineStats& after) {
  EngineStats between;
  between.spec_verify_calls_total = after.spec_verify_calls_total - before.spec_verify_calls_total;
  between.spec_correct_drafts_total = after.spec_correct_drafts_total - before.spec_correct_drafts_total;
  return between.spec_accept_length();
}

// Returns how many tokens a request can generate before all prompts of the batch are computed.
int64_t tokens_ahead(const Engine& engine, const Case& c, const BenchOptions& options) {
  if (c.n_gen == 0 || c.batch == 1) return 0;
  const int64_t steps = c.batch * c.num_ids() / engine.info().max_prefill_tokens;
  return (steps + steps / 8 + 2) * (options.has_drafts() ? options.engine.speculative_num_draft_tokens : 1);
}

// Runs the case alone and, with --beside-busy, alternates it with runs next to busy processes.
Result<std::vector<Measured>> measure(Engine& engine, const Case& c, const BenchOptions& options,
                                      LatencyLimit* limit) {
  std::vector<Measured> rows = {{.what = c, .num_ahead = tokens_ahead(engine, c, options)}};
  if (options.busy > 0) {
    rows.push_back(rows[0]);
    rows[1].what.busy = options.busy;
  }
  double read_gbps = limit != nullptr ? limit->read_gbps() : 0;
  EngineStats before;
  for (int r = options.no_warmup ? 0 : -1; r < options.repeat; ++r) {
    if (r == 0) before = engine.stats();
    for (Measured& m : rows)
      if (Status status = run_once(engine, m, r, options.is_synthetic()); !status.ok()) return status;
  }
  if (limit != nullptr) read_gbps = std::max(read_gbps, limit->read_gbps());
  for (Measured& m : rows) {
    m.accept_length = accept_length(before, engine.stats());
    m.read_gbps = read_gbps;
    if (limit != nullptr) m.limit = limit_of(c, *limit, read_gbps);
    if (m.what.busy > 0) m.of_alone = m.median_rate() / rows[0].median_rate();
  }
  return rows;
}

std::string size_text(int64_t bytes) {
  return bytes >= int64_t{1} << 30 ? fmt::format("{:.2f} GiB", static_cast<double>(bytes) / (1 << 30))
                                   : fmt::format("{:.2f} MiB", static_cast<double>(bytes) / (1 << 20));
}

// Returns "" for one rank, otherwise text such as ", tp 2, dp 2, deepep".
std::string layout_text(const EngineConfig& config) {
  std::string text;
  const auto add = [&](const char* name, int size) {
    if (size > 1) text += fmt::format(", {} {}", name, size);
  };
  add("tp", config.tp_size);
  add("ep", config.ep_size);
  add("dp", config.dp_size);
  if (config.tp_size > 1 && config.moe_a2a_backend != "none") text += ", " + config.moe_a2a_backend;
  return text;
}

// "NGRAM" or "synthetic 0.80"; "none" for a row without drafts.
std::string drafts_text(const Measured& m, const BenchOptions& options) {
  if (m.accept_length == 0) return "none";
  const EngineConfig& config = options.engine;
  if (!options.is_synthetic()) return config.speculative_algorithm;
  const std::string rate = fmt::format("synthetic {:.2f}", config.speculative_synthetic_acceptance);
  return options.has_random_drafts ? rate : config.speculative_algorithm + ", " + rate;
}

json to_json(const Measured& m, const ModelInfo& info, const BenchOptions& options) {
  const EngineConfig& config = options.engine;
  json samples = json::array();
  for (const double rate : m.rates) samples.push_back(rate);
  json row = {{"model", info.name},
              {"quantization", info.quantization},
              {"model_size", info.weight_bytes},
              {"backend", info.backend},
              {"n_tp", config.tp_size},
              {"n_ep", config.ep_size},
              {"n_dp", config.dp_size},
              {"a2a", config.moe_a2a_backend},
              {"n_threads", m.what.threads},
              {"n_batch", m.what.batch},
              {"n_prompt", m.what.n_prompt},
              {"n_gen", m.what.n_gen},
              {"n_depth", m.what.n_depth},
              {"n_busy", m.what.busy},
              {"n_together", m.num_together},
              {"of_alone", m.of_alone},
              {"test", m.what.name()},
              {"avg_ts", m.mean()},
              {"stddev_ts", m.stddev()},
              {"samples_ts", std::move(samples)}};
  if (options.has_drafts()) {
    row["speculative_algorithm"] = drafts_text(m, options);
    row["spec_accept_length"] = m.accept_length;
    row["of_plain"] = m.of_plain;
  }
  if (m.limit > 0) {
    row["read_gbps"] = m.read_gbps;
    row["limit_ts"] = m.limit;
    row["fraction"] = m.mean() / m.limit;
  }
  return row;
}

std::string limit_cells(const Measured& m) {
  return fmt::format(" {:.1f} | {:.1f} | {:.0f} % |", m.read_gbps, m.limit, 100 * m.mean() / m.limit);
}

// Prints each row as soon as it is measured and, for JSON, the enclosing brackets.
class Table {
 public:
  Table(std::string form, const BenchOptions& options) : form_(std::move(form)), options_(options) {
    if (form_ == "json") fmt::print("[");
  }

  void add(const Measured& m, const ModelInfo& info) {
    const json row = to_json(m, info, options_);
    if (form_ == "md") {
      const bool limited = m.limit > 0;
      if (rows_ == 0)
        fmt::print(
            "| model | size | quant | backend | threads | test | t/s |{}\n"
            "| --- | ---: | --- | --- | ---: | ---: | ---: |{}\n",
            limited ? " read GB/s | limit t/s | of the limit |" : "", limited ? " ---: | ---: | ---: |" : "");
      std::string compared =
          m.what.busy > 0 ? fmt::format(", {:.0f} % of the rate alone", 100 * m.of_alone) : "";
      if (m.of_plain > 0) compared += fmt::format(", {:.2f}x plain decoding", m.of_plain);
      const std::string drafts = m.accept_length > 0 ? fmt::format(", {}, accept len {:.2f}",
                                                                   drafts_text(m, options_), m.accept_length)
                                                     : "";
      fmt::print("| {} | {} | {} | {}{}{} | {} | {} | {:.2f} ± {:.2f}{} |{}\n", info.name,
                 size_text(info.weight_bytes), info.quantization, info.backend, layout_text(options_.engine),
                 drafts, m.what.threads, m.what.name(), m.mean(), m.stddev(), compared,
                 limited ? limit_cells(m) : "");
    } else if (form_ == "csv") {
      std::string names, values;
      for (const auto& [key, value] : row.items()) {
        if (value.is_array()) continue;
        names += (names.empty() ? "" : ",") + key;
        values += (values.empty() ? "" : ",") + value.dump();
      }
      if (rows_ == 0) fmt::print("{}\n", names);
      fmt::print("{}\n", values);
    } else {
      fmt::print("{}{}{}", form_ == "json" && rows_ > 0 ? ",\n" : "", row.dump(),
                 form_ == "jsonl" ? "\n" : "");
    }
    ++rows_;
    std::fflush(stdout);
  }

  void finish() {
    if (form_ == "json") fmt::print("]\n");
  }

 private:
  const std::string form_;
  const BenchOptions& options_;  // as given
  int rows_ = 0;
};

std::vector<Case> cases(const BenchOptions& options, int threads) {
  std::vector<Case> list;
  for (const int64_t batch : options.batch) {
    for (const int64_t n : options.prompt) {
      if (n > 0) list.push_back({threads, batch, n, 0});
    }
    for (const int64_t depth : options.depth) {
      for (const int64_t n : options.generate) {
        if (n > 0) list.push_back({threads, batch, 0, n, depth});
      }
    }
  }
  return list;
}

EngineConfig without_drafts(EngineConfig config) {
  const EngineConfig defaults;
  config.speculative_algorithm = defaults.speculative_algorithm;
  config.speculative_draft_model_path = defaults.speculative_draft_model_path;
  config.speculative_num_draft_tokens = defaults.speculative_num_draft_tokens;
  config.speculative_num_steps = defaults.speculative_num_steps;
  config.speculative_eagle_topk = defaults.speculative_eagle_topk;
  config.speculative_ngram_min_match_window_size = defaults.speculative_ngram_min_match_window_size;
  config.speculative_ngram_max_match_window_size = defaults.speculative_ngram_max_match_window_size;
  return config;
}

// Loads one engine after another, in each process of a job: for each of --threads, with drafts also one
// without them, whose decode tests run first.
class LatencyBench {
 public:
  explicit LatencyBench(const BenchOptions& options)
      : options_(options), table_(Engine::is_follower(options.engine) ? "none" : options.output, options) {}

  int run() {
    if (cases(options_, 1).empty())
      return report_error(invalid_argument("--n-prompt 0 and --n-gen 0 leave no test to run"));
    for (const int threads : options_.threads) {
      const EngineConfig config = engine_config(threads);
      if (options_.has_drafts())
        if (const int code = run_engine(without_drafts(config), threads); code != kExitOk) return code;
      if (const int code = run_engine(config, threads); code != kExitOk) return code;
    }
    table_.finish();
    return kExitOk;
  }

 private:
  EngineConfig engine_config(int threads) {
    EngineConfig config = options_.engine;
    config.threads = threads;
    const int64_t most = *std::max_element(options_.batch.begin(), options_.batch.end());
    config.max_running_requests = std::max(config.max_running_requests, static_cast<int>(most));
    config.max_queued_requests = std::max(config.max_queued_requests, static_cast<int>(most));
    if (options_.has_random_drafts) config.draft_source = random_drafts_.source();
    return config;
  }

  int run_engine(const EngineConfig& config, int threads) {
    if (Engine::is_follower(config)) return follow(config);
    auto engine = Engine::make(config);
    if (!engine.ok()) return report_error(engine.status());
    if (options_.has_random_drafts) random_drafts_.set_engine(**engine);
    const int used = threads > 0 ? threads : static_cast<int>(std::thread::hardware_concurrency());
    const auto limit = LatencyLimit::make(config, used, options_.cold_mib);
    if (!limit.ok()) return report_error(limit.status());
    // With speculative decoding a step is not a token per request.
    LatencyLimit* limited = options_.has_drafts() ? nullptr : limit->get();
    const bool is_compared = options_.has_drafts() && config.speculative_algorithm == "none";
    for (const Case& c : cases(options_, used)) {
      if (is_compared && c.n_gen == 0) continue;
      auto measured = measure(**engine, c, options_, limited);
      if (!measured.ok()) return report_error(measured.status());
      for (Measured& row : *measured) {
        const std::string name = std::to_string(threads) + " " + row.what.name();
        if (is_compared) plain_rates_[name] = row.median_rate();
        if (!is_compared && plain_rates_.contains(name))
          row.of_plain = row.median_rate() / plain_rates_[name];
        table_.add(row, (*engine)->info());
      }
    }
    return kExitOk;
  }

  const BenchOptions& options_;
  RandomDrafts random_drafts_;
  Table table_;
  std::map<std::string, double> plain_rates_;  // tokens per second without drafts, by threads and test
};

}  // namespace

void add_bench_latency(CLI::App& bench, int& exit_code) {
  CLI::App* subcommand = bench.add_subcommand(
      "latency", "Measure the prefill (pp) and decode (tg) speed of the engine in tokens per second");
  auto options = std::make_shared<BenchOptions>();
  add_engine_flags(*subcommand, options->engine);
  // A --threads flag that takes a list replaces this one.
  subcommand->remove_option(subcommand->get_option("--threads"));
  const auto list = [subcommand](const char* names, auto& values, const char* help) {
    return subcommand->add_option(names, values, help)->delimiter(',')->capture_default_str();
  };
  list("-t,--threads", options->threads, "numbers of CPU threads; 0: all cores")->check(not_negative());
  list("-p,--n-prompt", options->prompt, "prompt lengths in tokens; 0: no prefill test")
      ->check(not_negative());
  list("-n,--n-gen", options->generate, "decode lengths in tokens; 0: no decode test")->check(not_negative());
  list("-d,--n-depth", options->depth, "context tokens before decoding; their prefill is not timed")
      ->check(not_negative());
  list("-b,--batch", options->batch, "numbers of concurrent requests")->check(in_range(1, 4096));
  subcommand->add_option("-r,--repetitions", options->repeat, "repeats of each test")
      ->check(in_range(1, 1000))
      ->capture_default_str();
  subcommand->add_option("--cold-mib", options->cold_mib, kColdMibHelp)->check(in_range(1, 1 << 24));
  subcommand
      ->add_option("--beside-busy", options->busy,
                   "also run each test next to this many busy processes, alternating with runs alone")
      ->check(in_range(0, 1024));
  subcommand->add_flag("--no-warmup", options->no_warmup, "time the first run of each test too");
  subcommand->add_option("-o,--output", options->output, "output format: md, csv, json or jsonl")
      ->check(CLI::IsMember({"md", "csv", "json", "jsonl"}))
      ->capture_default_str();
  subcommand->add_flag_callback(
      "--json", [options] { options->output = "json"; }, "the same as -o json");
  subcommand
      ->add_option("--speculative-synthetic-acceptance", options->engine.speculative_synthetic_acceptance,
                   "probability that a draft is kept if the one before is; the model's choice does not "
                   "matter, and outputs "
                   "are random; without --speculative-algorithm, drafts are random tokens")
      ->check(in_range(0.0, 1.0));
  subcommand->callback([options, &exit_code] {
    options->has_random_drafts = options->is_synthetic() && !options->has_drafts();
    if (options->has_random_drafts) options->engine.speculative_algorithm = "NGRAM";
    exit_code = LatencyBench(*options).run();
  });
}

}  // namespace fp4moe
