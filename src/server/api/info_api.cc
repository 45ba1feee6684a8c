#include "server/api/info_api.h"

#include <algorithm>
#include <chrono>
#include <ctime>

#include "server/http/errors.h"
#include "server/http/route_path.h"

namespace fp4moe {

namespace {

json model_card(const RouteContext& context, const std::string& name) {
  const ModelInfo& info = context.engine.info();
  return {{"id", name},
          {"object", "model"},
          {"created", context.started_at},
          {"owned_by", "fp4moe"},
          {"root", context.engine.weight_source().model_path},
          {"max_model_len", info.context_length}};
}

// Such as "2026-01-31T23:59:59Z".
std::string iso_time(std::time_t seconds) {
  std::tm parts = {};
  ::gmtime_r(&seconds, &parts);
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts)};
}

double token_usage(const EngineStats& stats) {
  return static_cast<double>(stats.num_used_tokens) /
         static_cast<double>(std::max<int64_t>(1, stats.max_total_num_tokens));
}

}  // namespace

HttpResponse models_response(const RouteContext& context, const HttpRequest&) {
  json cards = json::array();
  for (const std::string& name : served_names(context.engine.info()))
    cards.push_back(model_card(context, name));
  return json_response({{"object", "list"}, {"data", std::move(cards)}});
}

HttpResponse model_response(const RouteContext& context, const HttpRequest& request) {
  const std::string id = path_tail("/v1/models/", request.path);
  const std::vector<std::string> names = served_names(context.engine.info());
  if (std::find(names.begin(), names.end(), id) != names.end()) return json_response(model_card(context, id));
  return error_response(unknown_model(context.engine.info(), id), "model");
}

HttpResponse model_info_response(const RouteContext& context, const HttpRequest&) {
  const ModelInfo& info = context.engine.info();
  const WeightSource weights = context.engine.weight_source();
  return json_response({{"model_path", weights.model_path},
                        {"tokenizer_path", info.tokenizer_path},
                        {"is_generation", true},
                        {"preferred_sampling_params", nullptr},
                        {"weight_version", weights.version},
                        {"has_image_understanding", false},
                        {"has_audio_understanding", false},
                        {"architectures", {info.architecture}}});
}

HttpResponse version_response(const RouteContext&, const HttpRequest&) {
  return json_response({{"version", FP4MOE_VERSION}});
}

HttpResponse load_response(const RouteContext& context, const HttpRequest&) {
  const EngineStats stats = context.engine.stats();
  return json_response(json::array({{{"dp_rank", 0},
                                     {"num_reqs", stats.num_running_reqs + stats.num_queue_reqs},
                                     {"num_waiting_reqs", stats.num_queue_reqs},
                                     {"num_tokens", stats.num_used_tokens}}}));
}

HttpResponse loads_response(const RouteContext& context, const HttpRequest&) {
  const EngineStats stats = context.engine.stats();
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  const json load = {{"dp_rank", 0},
                     {"timestamp", now.count()},
                     {"num_running_reqs", stats.num_running_reqs},
                     {"num_waiting_reqs", stats.num_queue_reqs},
                     {"num_used_tokens", stats.num_used_tokens},
                     {"max_total_num_tokens", stats.max_total_num_tokens},
                     {"token_usage", token_usage(stats)},
                     {"swa_num_used_tokens", stats.num_used_window_pages * context.engine.info().page_size},
                     {"swa_max_total_num_tokens", stats.num_window_pages * context.engine.info().page_size},
                     {"gen_throughput", stats.gen_throughput},
                     {"cache_hit_rate", stats.cache_hit_rate},
                     {"max_running_requests", context.engine.info().max_running_requests},
                     {"queues",
                      {{"waiting", stats.num_queue_reqs},
                       {"grammar", stats.num_grammar_queue_reqs},
                       {"retracted", stats.num_retracted_reqs}}}};
  return json_response({{"timestamp", iso_time(static_cast<std::time_t>(now.count()))},
                        {"version", FP4MOE_VERSION},
                        {"loads", json::array({load})}});
}

HttpResponse props_response(const RouteContext& context, const HttpRequest&) {
  const ModelInfo& info = context.engine.info();
  const SamplingParams& sampling = info.default_sampling;
  const json params = {{"temperature", sampling.temperature},
                       {"top_k", sampling.top_k},
                       {"top_p", sampling.top_p},
                       {"min_p", sampling.min_p},
                       {"repeat_penalty", sampling.repetition_penalty}};
  const int32_t end = info.eos_token_ids.empty() ? -1 : info.eos_token_ids.front();
  return json_response({{"default_generation_settings", {{"params", params}, {"n_ctx", info.context_length}}},
                        {"total_slots", info.max_running_requests},
                        {"model_alias", info.name},
                        {"model_path", context.engine.weight_source().model_path},
                        {"modalities", {{"vision", false}, {"video", false}, {"audio", false}}},
                        {"endpoint_slots", false},
                        {"endpoint_props", false},
                        {"endpoint_metrics", true},
                        {"chat_template", info.chat_template},
                        {"eos_token", context.engine.token_bytes(end)},
                        {"build_info", "fp4moe " FP4MOE_VERSION},
                        {"is_sleeping", false}});
}

HttpResponse slots_response(const RouteContext&, const HttpRequest&) {
  return error_response(
      not_found("/slots: this server has no slots; /get_load and /v1/loads report its load"));
}

}  // namespace fp4moe
