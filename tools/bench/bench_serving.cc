// fp4moe bench serving: a load generator for OpenAI-compatible servers with the flags, labels and JSON keys
// of SGLang's bench_serving.
#include <fmt/format.h>
#include <sys/resource.h>

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>

#include "bench/serving_dataset.h"
#include "bench/serving_report.h"
#include "eval/json_client.h"
#include "flag_checks.h"
#include "server/http/server_url.h"
#include "subcommand.h"

namespace fp4moe {

namespace {

using json = nlohmann::ordered_json;

constexpr double kLeastRate = 0.01;  // requests per second

struct ServingOptions {
  DatasetOptions dataset;
  LoadOptions load;
  std::string backend = "sglang-oai";
  std::string base_url, host = "127.0.0.1", model, extra_body, output_file, tag;
  int port = 30000;
  int64_t warmup_requests = 1;
  bool disable_stream = false, disable_ignore_eos = false, output_details = false, json_to_stdout = false;

  // The stream for human-readable output.
  FILE* prints() const { return json_to_stdout ? stderr : stdout; }
};

std::string to_text(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

// Returns a field of a GET response, or null if the server does not have the route or the field.
json ask_for(JsonClient& client, const std::string& path, const char* pointer) {
  const auto reply = client.get(path);
  if (!reply.ok()) return {};
  const json response = json::parse(*reply, nullptr, false);
  const json::json_pointer place(pointer);
  return response.is_object() && response.contains(place) ? response[place] : json();
}

// Gets the model's name and vocabulary size from the server unless they were given.
Status ask_server(ServingOptions& options) {
  auto client = JsonClient::make(options.base_url, options.load.api_key);
  if (!client.ok()) return client.status();
  if (const auto models = client->get("/v1/models"); !models.ok())
    return unavailable(models.status().message());
  if (options.model.empty()) {
    const json model = ask_for(*client, "/v1/models", "/data/0/id");
    if (!model.is_string()) return data_loss(options.base_url + "/v1/models lists no models; set --model");
    options.model = model;
  }
  if (options.dataset.name != "random" || options.dataset.chat || options.dataset.vocab_size > 0) return {};
  json vocab_size = ask_for(*client, "/server_info", "/vocab_size");
  if (!vocab_size.is_number_unsigned()) vocab_size = ask_for(*client, "/v1/models", "/data/0/meta/n_vocab");
  if (!vocab_size.is_number_unsigned() || vocab_size == 0)
    return unsupported(
        options.base_url +
        " does not report its vocabulary size at /server_info or /v1/models; set --vocab-size");
  options.dataset.vocab_size = vocab_size;
  return {};
}

// Returns a request's body; keys of --extra-request-body override other keys.
std::string make_body(const ServingOptions& options, const ServingPrompt& prompt, const json& extra) {
  json body = {{"model", options.model}};
  if (options.dataset.chat) {
    body["messages"] = json::array({{{"role", "user"}, {"content", prompt.content}}});
  } else {
    body["prompt"] = prompt.content;
  }
  body.update({{"temperature", 0.0},
               {"max_tokens", prompt.max_tokens},
               {"ignore_eos", !options.disable_ignore_eos},
               {"stream", !options.disable_stream}});
  if (!options.disable_stream) body["stream_options"] = {{"include_usage", true}};
  body.update(extra);
  return to_text(body);
}

// Warms the server up: sends the first request several times at once, so that one-time costs are not
// measured.
Status warm_up(const ServingOptions& options, const std::string& body) {
  LoadOptions load = options.load;
  load.request_rate = std::numeric_limits<double>::infinity();
  load.max_concurrency = 0;
  const auto run =
      run_load(load, std::vector<std::string>(static_cast<size_t>(options.warmup_requests), body));
  if (!run.ok()) return run.status();
  for (const ServingResponse& response : run->responses) {
    if (!response.error.ok()) return unavailable("warm-up: " + response.error.message());
  }
  return {};
}

json describe(const ServingOptions& options, const ServingReport& report) {
  const DatasetOptions& d = options.dataset;
  json result = {{"tag", options.tag},
                 {"backend", options.backend},
                 {"model", options.model},
                 {"dataset_name", d.name},
                 {"num_prompts", report.completed + report.failed},
                 {"request_rate", nullptr},
                 {"max_concurrency", nullptr},
                 {"random_input_len", d.random_input_len},
                 {"random_output_len", d.random_output_len},
                 {"random_range_ratio", d.random_range_ratio},
                 {"seed", d.seed}};
  if (std::isfinite(options.load.request_rate)) result["request_rate"] = options.load.request_rate;
  if (options.load.max_concurrency > 0) result["max_concurrency"] = options.load.max_concurrency;
  result.update(to_json(report));
  return result;
}

void add_details(json& result, const LoadRun& run, const std::vector<AskedTokens>& asked) {
  for (const char* key : {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"})
    result[key] = json::array();
  for (size_t i = 0; i < run.responses.size(); ++i) {
    const ServingResponse& response = run.responses[i];
    result["input_lens"].push_back(response.has_usage ? response.prompt_tokens : asked[i].prompt);
    result["output_lens"].push_back(response.output_tokens);
    result["ttfts"].push_back(response.first_text_s < 0 ? json() : json(response.first_text_s));
    result["itls"].push_back(response.gaps_s);
    result["generated_texts"].push_back(response.text);
    result["errors"].push_back(response.error.message());
  }
}

// Opens the file before the first request, so that no result is lost if it cannot be written.
Status open_output(const std::string& path, std::ofstream& file) {
  if (path.empty()) return {};
  errno = 0;
  file.open(path, std::ios::binary | std::ios::app);
  return file ? Status() : invalid_argument("--output-file " + path + ": " + std::strerror(errno));
}

Status append_line(const std::string& path, std::ofstream& file, const std::string& line) {
  if (path.empty()) return {};
  errno = 0;
  file << line << "\n";
  file.close();
  return file ? Status() : data_loss("cannot write " + path + ": " + std::strerror(errno));
}

void print_head(const ServingOptions& options) {
  const LoadOptions& load = options.load;
  fmt::print(options.prints(), "\n{:=^50}\n{:<40} {:<10}\n{:<40} {:<10}\n{:<40} {:<10}\n",
             " Serving Benchmark Result ", "Backend:", options.backend,
             "Traffic request rate:", load.request_rate, "Max request concurrency:",
             load.max_concurrency > 0 ? std::to_string(load.max_concurrency) : "not set");
}

// Prints each distinct error with its count.
Status name_failures(const LoadRun& run) {
  std::map<std::string, int64_t> counts;
  int64_t failed = 0;
  for (const ServingResponse& response : run.responses) {
    if (response.error.ok()) continue;
    ++counts[response.error.message()];
    ++failed;
  }
  for (const auto& [message, count] : counts) fmt::print(stderr, "failed, {} x: {}\n", count, message);
  if (failed == 0) return {};
  return unavailable(fmt::format("{} of {} requests failed", failed, run.responses.size()));
}

// Raises the limit on open files, to allow as many connections as possible.
void raise_file_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

Result<json> parse_extra(const std::string& text) {
  if (text.empty()) return json(json::object());
  json extra = json::parse(text, nullptr, false);
  if (!extra.is_object()) return invalid_argument("--extra-request-body " + text + " must be a JSON object");
  return extra;
}

Status prepare(ServingOptions& options) {
  if (options.base_url.empty())
    options.base_url = fmt::format("http://{}:{}", url_host(options.host), options.port);
  if (options.load.api_key.empty()) {
    const char* key = std::getenv("OPENAI_API_KEY");
    options.load.api_key = key == nullptr ? "" : key;
  }
  const auto url = parse_server_url(options.base_url);
  if (!url.ok()) return url.status();
  options.load.url = *url;
  options.load.stream = !options.disable_stream;
  options.load.seed = options.dataset.seed;
  options.dataset.chat = options.backend.ends_with("-chat");
  options.load.path = options.dataset.chat ? "/v1/chat/completions" : "/v1/completions";
  if ((options.dataset.name == "file") != !options.dataset.path.empty())
    return invalid_argument(
        "--dataset-name file requires --dataset-path, and --dataset-path requires --dataset-name file");
  raise_file_limit();
  return ask_server(options);
}

Status bench_serving(ServingOptions& options) {
  std::ofstream output;
  if (Status status = open_output(options.output_file, output); !status.ok()) return status;
  if (Status status = prepare(options); !status.ok()) return status;
  const auto extra = parse_extra(options.extra_body);
  if (!extra.ok()) return extra.status();
  const auto prompts = make_prompts(options.dataset);
  if (!prompts.ok()) return prompts.status();
  std::vector<std::string> bodies;
  std::vector<AskedTokens> asked;
  for (const ServingPrompt& prompt : *prompts) {
    bodies.push_back(make_body(options, prompt, *extra));
    asked.push_back({prompt.num_ids, options.disable_ignore_eos ? 0 : prompt.max_tokens});
  }
  if (Status status = warm_up(options, bodies[0]); !status.ok()) return status;
  const auto run = run_load(options.load, bodies);
  if (!run.ok()) return run.status();

  const ServingReport report = make_serving_report(*run, asked);
  print_head(options);
  print_report(options.prints(), report);
  fmt::print(options.prints(), "{:=^50}\n", "");
  json result = describe(options, report);
  if (options.output_details) add_details(result, *run, asked);
  if (options.json_to_stdout) fmt::print("{}\n", to_text(result));
  if (Status status = append_line(options.output_file, output, to_text(result)); !status.ok()) return status;
  return name_failures(*run);
}

void add_dataset_flags(CLI::App& subcommand, DatasetOptions& d) {
  const auto flag = [&subcommand](const char* names, auto& value, const char* help) {
    return subcommand.add_option(names, value, help)->group("Requests")->capture_default_str();
  };
  flag("--dataset-name", d.name, "source of the prompts: random or file")
      ->check(CLI::IsMember({"random", "file"}));
  flag("--dataset-path", d.path,
       R"(file of JSON lines with "prompt" (text or token ids) and optionally "max_tokens")")
      ->type_name("FILE");
  flag("--num-prompts", d.num_prompts, "number of requests; with a file, at most its number of lines")
      ->check(in_range(1, 1 << 24));
  flag("--random-input-len", d.random_input_len, "tokens per prompt, or words for a chat backend")
      ->check(in_range(1, 1 << 24));
  flag("--random-output-len", d.random_output_len, "tokens per output")->check(in_range(1, 1 << 24));
  flag("--random-range-ratio", d.random_range_ratio, "lengths are uniform in [ratio * length, length]")
      ->check(in_range(0.0, 1.0));
  flag("--vocab-size", d.vocab_size,
       "exclusive upper bound of random token ids; 0: as reported by the server")
      ->check(not_negative());
  flag("--seed", d.seed, "seed for prompts, lengths and send times");
}

}  // namespace

void add_bench_serving(CLI::App& bench, int& exit_code) {
  CLI::App* subcommand = bench.add_subcommand(
      "serving", "Send requests to any OpenAI-compatible server and measure its performance");
  auto options = std::make_shared<ServingOptions>();
  ServingOptions& o = *options;
  const auto flag = [subcommand](const char* names, auto& value, const char* help) {
    return subcommand->add_option(names, value, help)->capture_default_str();
  };
  flag("--backend", o.backend, "sglang-oai and vllm: /v1/completions; with -chat: /v1/chat/completions")
      ->check(CLI::IsMember({"sglang-oai", "sglang-oai-chat", "vllm", "vllm-chat"}));
  flag("--base-url", o.base_url, "server URL, such as http://127.0.0.1:30000; overrides --host and --port");
  flag("--host", o.host, "server host");
  flag("--port", o.port, "server port");
  flag("--api-key", o.load.api_key, "the server's API key; default: environment variable OPENAI_API_KEY");
  flag("--model", o.model, "model name; default: the server's first model");
  add_dataset_flags(*subcommand, o.dataset);
  flag("--request-rate", o.load.request_rate, "requests per second, at random times; inf: all at once")
      ->check([](const std::string& text) {
        double rate = 0;
        const bool is_number = CLI::detail::lexical_cast(text, rate);
        return is_number && rate >= kLeastRate
                   ? std::string()
                   : fmt::format("{} must be inf or at least {}", text, kLeastRate);
      });
  flag("--max-concurrency", o.load.max_concurrency, "maximum requests in flight; 0: no limit")
      ->check(not_negative());
  flag("--warmup-requests", o.warmup_requests,
       "copies of the first request to send first, without measuring them")
      ->check(in_range(0, 4096));
  flag("--timeout", o.load.timeout_s, "seconds without received bytes after which a request fails")
      ->check(in_range(0.001, 1e6));
  subcommand->add_flag(
      "--disable-stream", o.disable_stream,
      "request whole responses; the report then has no time to first token or between tokens");
  subcommand->add_flag("--disable-ignore-eos", o.disable_ignore_eos,
                       "let outputs end before their requested length");
  flag("--extra-request-body", o.extra_body, "JSON object whose fields are added to each request");
  flag("--output-file", o.output_file, "file to append the result to, as one line of JSON")
      ->type_name("FILE");
  subcommand->add_flag("--output-details", o.output_details,
                       "add the lengths, times and text of each request to the result");
  flag("--tag", o.tag, "text stored with the result");
  subcommand->add_flag("--json", o.json_to_stdout, "print the result to stdout; other output goes to stderr");
  subcommand->callback([options, &exit_code] {
    const Status status = bench_serving(*options);
    exit_code = status.ok() ? kExitOk : report_error(status);
  });
}

}  // namespace fp4moe
