#include "server/api/request_log.h"

#include "server/api/apis.h"

namespace fp4moe {

namespace {

constexpr size_t kCutBytes = 2048;

// Level 3 logs the whole text, level 2 its beginning and end.
std::string cut(const std::string& text, int level) {
  if (level > 2 || text.size() <= kCutBytes) return text;
  return text.substr(0, kCutBytes / 2) + "..." + text.substr(text.size() - kCutBytes / 2);
}

json print_sampling(const SamplingParams& s) {
  return {{"temperature", s.temperature},
          {"top_p", s.top_p},
          {"top_k", s.top_k},
          {"seed", s.seed ? json(*s.seed) : json(nullptr)},
          {"max_new_tokens", s.max_new_tokens},
          {"ignore_eos", s.ignore_eos},
          {"num_stops", s.stop.size() + s.stop_token_ids.size()}};
}

}  // namespace

void log_received(const ServerConfig& config, const HttpRequest& http, const GenerationCall& call) {
  if (!config.request_sink) return;
  json ids = json::array(), sizes = json::array();
  for (const Request& request : call.requests) ids.push_back(request.id);
  for (const PromptIds& prompt : call.prompts) sizes.push_back(prompt->size());
  json fields = {{"rid", std::move(ids)},
                 {"path", http.path},
                 {"stream", call.stream},
                 {"prompt_tokens", std::move(sizes)}};
  if (config.log_requests_level >= 1 && !call.requests.empty())
    fields["sampling_params"] = print_sampling(call.requests.front().sampling);
  if (config.log_requests_level >= 2) fields["body"] = cut(http.body, config.log_requests_level);
  config.request_sink("request.received", to_text(fields));
}

void log_finished(const ServerConfig& config, const std::vector<Choice>& choices, const std::string& error) {
  if (!config.request_sink) return;
  json list = json::array();
  for (const Choice& choice : choices) {
    json entry = {{"rid", choice.request_id},
                  {"finish_reason", finish_reason_name(choice.finish_reason)},
                  {"prompt_tokens", choice.prompt_tokens},
                  {"completion_tokens", choice.completion_tokens},
                  {"e2e_latency", choice.seconds}};
    if (config.log_requests_level >= 2) entry["text"] = cut(choice.text, config.log_requests_level);
    list.push_back(std::move(entry));
  }
  json fields = {{"choices", std::move(list)}};
  if (!error.empty()) fields["error"] = error;
  config.request_sink("request.finished", to_text(fields));
}

}  // namespace fp4moe
