// fp4moe eval: sends a question set to a server and scores the responses, with the flags and output of
// SGLang's run_eval.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>

#include "base/check.h"
#include "eval/eval_questions.h"
#include "eval/eval_score.h"
#include "eval/json_client.h"
#include "flag_checks.h"
#include "inspect/html_page.h"
#include "io/file.h"
#include "server/http/server_url.h"
#include "subcommand.h"

namespace fp4moe {

namespace {

using json = nlohmann::ordered_json;

struct EvalOptions {
  QuestionOptions questions;
  std::string base_url, host = "127.0.0.1", api_key, model, api;
  int port = 30000;
  int repeat = 1;
  int num_threads = 512;
  int64_t max_tokens = 2048;
  double temperature = 0, top_p = 1;
  std::optional<int64_t> top_k;
  std::string output_json, output_html;
  bool json_to_stdout = false;

  // Stream for human-readable output.
  FILE* prints() const { return json_to_stdout ? stderr : stdout; }
};

struct Answer {
  std::string text, finish_reason, extracted;
  int64_t completion_tokens = 0;
  bool right = false;
  Status error;  // why there is no usable response, otherwise ok
};

struct Round {
  std::vector<Answer> answers;  // in the order of the questions
  double seconds = 0;

  int64_t tokens() const {
    return std::accumulate(answers.begin(), answers.end(), int64_t{0},
                           [](int64_t sum, const Answer& a) { return sum + a.completion_tokens; });
  }
  double score() const {
    return static_cast<double>(
               std::count_if(answers.begin(), answers.end(), [](const Answer& a) { return a.right; })) /
           static_cast<double>(answers.size());
  }
};

std::string to_text(const json& value, int indent = -1) {
  return value.dump(indent, ' ', false, json::error_handler_t::replace);
}

// Returns the path and body of a request for the chosen API.
std::pair<std::string, json> make_request(const EvalOptions& options, const QuestionSet& set,
                                          const Question& q) {
  json sampling = {{"temperature", options.temperature}, {"top_p", options.top_p}};
  if (options.top_k) sampling["top_k"] = *options.top_k;
  if (!set.stop.empty()) sampling["stop"] = set.stop;
  if (options.api == "generate") {
    sampling["max_new_tokens"] = options.max_tokens;
    return {"/generate", {{"text", q.prompt}, {"sampling_params", sampling}}};
  }
  json body = {{"model", options.model}};
  if (options.api == "chat") {
    body["messages"] = json::array({{{"role", "user"}, {"content", q.prompt}}});
  } else {
    body["prompt"] = q.prompt;
  }
  body.update(sampling);
  body["max_tokens"] = options.max_tokens;
  return {options.api == "chat" ? "/v1/chat/completions" : "/v1/completions", body};
}

Answer read_answer(const EvalOptions& options, const std::string& body) {
  Answer answer;
  try {
    const json reply = json::parse(body);
    if (options.api == "generate") {
      answer.text = reply.at("text");
      answer.finish_reason = reply.at("meta_info").at("finish_reason").at("type");
      answer.completion_tokens = reply.at("meta_info").at("completion_tokens");
      return answer;
    }
    const json& choice = reply.at("choices").at(0);
    const json& text = options.api == "chat" ? choice.at("message").at("content") : choice.at("text");
    answer.text = text.is_null() ? "" : text.get<std::string>();
    answer.finish_reason = choice.at("finish_reason");
    answer.completion_tokens = reply.at("usage").at("completion_tokens");
  } catch (const json::exception& error) {
    answer.error = data_loss(std::string("unexpected response: ") + error.what());
  }
  return answer;
}

Round ask_all(const EvalOptions& options, const QuestionSet& set) {
  Round round;
  round.answers.resize(set.questions.size());
  std::atomic<size_t> next{0};
  const auto start = std::chrono::steady_clock::now();
  const auto work = [&] {
    auto client = JsonClient::make(options.base_url, options.api_key);
    for (size_t i = next.fetch_add(1); i < set.questions.size(); i = next.fetch_add(1)) {
      const auto [path, body] = make_request(options, set, set.questions[i]);
      auto reply = client->post(path, to_text(body));
      Answer& answer = round.answers[i];
      if (reply.ok()) answer = read_answer(options, *reply);
      if (!reply.ok()) answer.error = reply.status();
      answer.extracted = extract_answer(options.questions.eval_name, answer.text);
      answer.right = answer.error.ok() && answer.extracted == set.questions[i].expected;
    }
  };
  std::vector<std::thread> threads;
  const size_t count = std::min(static_cast<size_t>(options.num_threads), set.questions.size());
  for (size_t t = 0; t < count; ++t) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  round.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return round;
}

// Chooses the server's first model unless one was given; also checks that the server responds.
Status find_model(EvalOptions& options) {
  auto client = JsonClient::make(options.base_url, options.api_key);
  if (!client.ok()) return client.status();
  const auto reply = client->get("/v1/models");
  if (!reply.ok()) return reply.status();
  const json models = json::parse(*reply, nullptr, false);
  if (!options.model.empty()) return {};
  if (!models.is_object() || !models.contains("data") || !models["data"].is_array() || models["data"].empty())
    return data_loss(options.base_url + "/v1/models lists no models");
  options.model = models["data"][0].value("id", "");
  return {};
}

json report(const EvalOptions& options, const QuestionSet& set, const std::vector<Round>& rounds) {
  json result = {{"eval_name", options.questions.eval_name},
                 {"data_path", options.questions.data_path},
                 {"model", options.model},
                 {"api", options.api},
                 {"num_shots", options.questions.num_shots},
                 {"num_threads", options.num_threads},
                 {"max_tokens", options.max_tokens},
                 {"temperature", options.temperature},
                 {"rounds", json::array()}};
  for (const Round& round : rounds) {
    json answers = json::array();
    for (size_t i = 0; i < round.answers.size(); ++i) {
      const Answer& a = round.answers[i];
      answers.push_back({{"question", set.questions[i].text},
                         {"expected", set.questions[i].expected},
                         {"answer", a.text},
                         {"extracted", a.extracted},
                         {"correct", a.right},
                         {"finish_reason", a.finish_reason},
                         {"completion_tokens", a.completion_tokens},
                         {"error", a.error.ok() ? json(nullptr) : json(a.error.message())}});
    }
    result["rounds"].push_back({{"score", round.score()},
                                {"latency", round.seconds},
                                {"output_tokens", round.tokens()},
                                {"answers", std::move(answers)}});
  }
  return result;
}

std::string html_report(const json& result) {
  HtmlPage page(result["eval_name"]);
  for (const json& round : result["rounds"]) {
    page.heading(fmt::format("Score: {:.3f}", round["score"].get<double>()));
    std::vector<std::vector<std::string>> rows;
    for (const json& a : round["answers"])
      rows.push_back({a["question"], a["answer"], a["expected"], a["extracted"]});
    page.table({"question", "answer", "expected", "got"}, rows);
  }
  return page.text();
}

void print_round(FILE* file, const Round& round) {
  fmt::print(file, "Total latency: {:.3f} s\nScore: {:.3f}\nOutput throughput: {:.3f} token/s\n",
             round.seconds, round.score(), static_cast<double>(round.tokens()) / round.seconds);
}

void print_repeats(FILE* file, const std::vector<double>& scores) {
  std::string list;
  for (const double score : scores) list += fmt::format("{}'{:.3f}'", list.empty() ? "" : ", ", score);
  const double mean = std::accumulate(scores.begin(), scores.end(), 0.0) / static_cast<double>(scores.size());
  fmt::print(file, "{0}\nRepeat: {1}, mean: {2:.3f}\nScores: [{3}]\n{0}\n", std::string(20, '='),
             scores.size(), mean, list);
}

Status check_outputs(const EvalOptions& options) {
  if (!options.output_json.empty())
    FP4MOE_RETURN_IF_ERROR(check_writable("--output-json", options.output_json));
  return options.output_html.empty() ? Status() : check_writable("--output-html", options.output_html);
}

Status write_outputs(const EvalOptions& options, const json& result) {
  const std::string text = to_text(result, 1) + "\n";
  if (options.json_to_stdout) fmt::print("{}", text);
  if (!options.output_json.empty()) FP4MOE_RETURN_IF_ERROR(write_text_file(options.output_json, text));
  return options.output_html.empty() ? Status() : write_text_file(options.output_html, html_report(result));
}

int eval(EvalOptions options) {
  if (options.base_url.empty())
    options.base_url = fmt::format("http://{}:{}", url_host(options.host), options.port);
  const auto set = load_questions(options.questions);
  if (!set.ok()) return report_error(set.status());
  if (Status status = check_outputs(options); !status.ok()) return report_error(status);
  if (options.api.empty()) options.api = set->few_shot ? "completion" : "chat";
  if (Status status = find_model(options); !status.ok()) return report_error(status);

  std::vector<Round> rounds;
  std::vector<double> scores;
  size_t failed = 0;
  for (int r = 0; r < options.repeat; ++r) {
    rounds.push_back(ask_all(options, *set));
    print_round(options.prints(), rounds.back());
    scores.push_back(rounds.back().score());
    for (const Answer& a : rounds.back().answers) {
      if (!a.error.ok() && failed++ == 0) fmt::print(stderr, "first failed request: {}\n", a.error.message());
    }
  }
  if (options.repeat > 1) print_repeats(options.prints(), scores);
  const json result = report(options, *set, rounds);
  if (Status status = write_outputs(options, result); !status.ok()) return report_error(status);
  if (failed > 0) return report_error(unavailable(std::to_string(failed) + " requests failed"));
  return kExitOk;
}

}  // namespace

Result<double> score_server(const std::string& base_url, const QuestionOptions& questions) {
  EvalOptions options;
  options.questions = questions;
  options.base_url = base_url;
  FP4MOE_ASSIGN_OR_RETURN(const QuestionSet set, load_questions(questions));
  options.api = set.few_shot ? "completion" : "chat";
  FP4MOE_RETURN_IF_ERROR(find_model(options));
  const Round round = ask_all(options, set);
  for (const Answer& a : round.answers) FP4MOE_RETURN_IF_ERROR(a.error);
  return round.score();
}

void add_eval(CLI::App& app, int& exit_code) {
  CLI::App* subcommand = app.add_subcommand("eval", "Send a question set to a server and score the answers");
  auto options = std::make_shared<EvalOptions>();
  EvalOptions& o = *options;
  const auto flag = [subcommand](const char* names, auto& value, const char* help) {
    return subcommand->add_option(names, value, help)->capture_default_str();
  };
  flag("--eval-name", o.questions.eval_name, "question set: gsm8k, gpqa or mmlu")
      ->required()
      ->check(CLI::IsMember({"gsm8k", "gpqa", "mmlu"}));
  flag("--data-path,--gsm8k-data-path", o.questions.data_path,
       "file with the questions; gsm8k: JSON lines; gpqa, mmlu: CSV")
      ->required()
      ->type_name("FILE");
  flag("--base-url", o.base_url, "server URL, such as http://127.0.0.1:30000; overrides --host and --port");
  flag("--host", o.host, "server host");
  flag("--port", o.port, "server port");
  flag("--api-key", o.api_key, "the server's API key");
  flag("--model", o.model, "model name; default: the server's first model");
  flag("--api", o.api, "chat, completion or generate; default: chat, or completion if --num-shots is above 0")
      ->check(CLI::IsMember({"chat", "completion", "generate"}));
  flag("--num-shots", o.questions.num_shots,
       "number of worked examples in the prompt, taken from the start of the data")
      ->check(not_negative());
  flag("--num-examples", o.questions.num_examples, "number of questions; 0: all")->check(not_negative());
  flag("--num-threads", o.num_threads, "maximum concurrent requests")->check(in_range(1, 4096));
  flag("--repeat", o.repeat, "number of rounds")->check(in_range(1, 1000));
  flag("--max-tokens", o.max_tokens, "maximum tokens per answer");
  flag("--temperature", o.temperature, "sampling temperature; 0: greedy")->check(in_range(0.0, 100.0));
  flag("--top-p", o.top_p, "nucleus sampling probability")->check(in_range(0.0, 1.0));
  subcommand->add_option("--top-k", o.top_k, "number of candidate tokens");
  flag("--seed", o.questions.seed, "seed for shuffling gpqa's choices");
  flag("--output-json", o.output_json, "JSON file to write all answers to")->type_name("FILE");
  subcommand->add_flag("--json", o.json_to_stdout,
                       "print the JSON report to stdout; other output goes to stderr");
  flag("--output-html", o.output_html, "HTML file to write a report to")->type_name("FILE");
  subcommand->callback([options, &exit_code] { exit_code = eval(*options); });
}

}  // namespace fp4moe
