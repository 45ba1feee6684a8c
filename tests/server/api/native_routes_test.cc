// SGLang's native routes and the operator routes.
#include <future>

#include "server/observe/metrics.h"
#include "server/server_fixture.h"

namespace fp4moe {
namespace {

using nlohmann::json;

json post(const TestServer& s, const std::string& path, const std::string& body) {
  const HttpAnswer answer = http_post(s.port, path, body);
  EXPECT_EQ(answer.status, 200) << answer.body;
  return json::parse(answer.body);
}

TEST(Generate, Text) {
  TestServer s;
  const json body =
      post(s, "/generate", R"({"text":"abc","sampling_params":{"max_new_tokens":2,"temperature":0}})");
  EXPECT_EQ(body["text"], "ab");
  EXPECT_EQ(body["output_ids"], json::array({97, 98}));
  const json& meta = body["meta_info"];
  EXPECT_EQ(meta["finish_reason"], (json{{"type", "length"}, {"length", 2}}));
  EXPECT_EQ(meta["prompt_tokens"], 3);
  EXPECT_EQ(meta["cached_tokens"], 0);
  EXPECT_EQ(meta["weight_version"], "default");
  EXPECT_EQ(meta["completion_tokens"], 2);
  EXPECT_GT(meta["e2e_latency"].get<double>(), 0);
  EXPECT_FALSE(meta["id"].get<std::string>().empty());
}

TEST(Generate, IdsAndStopToken) {
  TestServer s;
  const json body = post(s, "/generate", R"({"input_ids":[97,98]})");
  EXPECT_EQ(body["output_ids"], json::array({97, 98, 256}));
  EXPECT_EQ(body["meta_info"]["finish_reason"], (json{{"type", "stop"}, {"matched", 256}}));
}

TEST(Generate, ListsGiveLists) {
  TestServer s;
  const json body = post(s, "/generate", R"({"text":["a","bc"]})");
  ASSERT_EQ(body.size(), 2u);
  EXPECT_EQ(body[1]["text"], "bc");
  EXPECT_NE(body[0]["meta_info"]["id"], body[1]["meta_info"]["id"]);
  EXPECT_EQ(post(s, "/generate", R"({"text":["a"]})").size(), 1u);
}

TEST(Generate, StreamRepeatsTheTextSoFar) {
  TestServer s;
  const HttpAnswer answer = http_post(s.port, "/generate", R"({"text":"ab","stream":true})");
  const auto events = parse_events(answer.body);
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[0]["text"], "a");
  EXPECT_EQ(events[1]["text"], "ab");
  EXPECT_TRUE(events[1]["meta_info"]["finish_reason"].is_null());
  EXPECT_EQ(events[2]["meta_info"]["finish_reason"]["type"], "stop");
  EXPECT_EQ(events[3], "[DONE]");
}

TEST(Generate, Logprobs) {
  TestServer s;
  const json body = post(
      s, "/generate",
      R"({"text":"z","return_logprob":true,"top_logprobs_num":1,"sampling_params":{"max_new_tokens":1}})");
  EXPECT_EQ(body["meta_info"]["output_token_logprobs"], json::parse("[[-0.5,122,null]]"));
  EXPECT_EQ(body["meta_info"]["output_top_logprobs"], json::parse("[[[-0.5,97,null]]]"));
}

TEST(Generate, PromptLogprobs) {
  TestServer s;
  const auto meta = [&](const std::string& more) {
    return post(s, "/generate",
                R"({"input_ids":[98,99,100],"return_logprob":true,"sampling_params":{"max_new_tokens":0})" +
                    more + "}")["meta_info"];
  };
  const json whole = meta(R"(,"logprob_start_len":0,"top_logprobs_num":1,"return_text_in_logprobs":true)");
  EXPECT_EQ(whole["input_token_logprobs"], json::parse(R"([[null,98,"b"],[-1.0,99,"c"],[-2.0,100,"d"]])"));
  EXPECT_EQ(whole["input_top_logprobs"], json::parse(R"([null,[[0.0,97,"a"]],[[0.0,97,"a"]]])"));
  EXPECT_EQ(whole["output_token_logprobs"], json::array());
  const json end = meta(R"(,"logprob_start_len":1)");
  EXPECT_EQ(end["input_token_logprobs"], json::parse("[[null,99,null],[-2.0,100,null]]"));
  EXPECT_FALSE(end.contains("input_top_logprobs"));
  EXPECT_EQ(meta("")["input_token_logprobs"], json::array());
  const HttpAnswer beyond =
      http_post(s.port, "/generate", R"({"input_ids":[98],"return_logprob":true,"logprob_start_len":2})");
  EXPECT_EQ(beyond.status, 400);
  EXPECT_EQ(json::parse(beyond.body)["error"]["param"], "logprob_start_len");
}

TEST(Generate, LogprobsOfListedIds) {
  TestServer s;
  const auto meta = [&](const std::string& more) {
    return post(s, "/generate",
                R"({"input_ids":[98,99,100],"token_ids_logprob":[97,256,97],)" + more + "}")["meta_info"];
  };
  const json row = json::parse("[[-24.25,97,null],[-64.0,256,null],[-24.25,97,null]]");
  const json whole =
      meta(R"("return_logprob":true,"logprob_start_len":1,"sampling_params":{"max_new_tokens":2})");
  EXPECT_EQ(whole["input_token_ids_logprobs"], json::array({nullptr, row}));
  EXPECT_EQ(whole["output_token_ids_logprobs"], json::array({row, row}));
  EXPECT_EQ(whole["output_token_logprobs"].size(), 2u);
  EXPECT_FALSE(whole.contains("output_top_logprobs"));
  const json texts = meta(R"("return_logprob":true,"return_text_in_logprobs":true)");
  EXPECT_EQ(texts["output_token_ids_logprobs"][0][0], json::parse(R"([-24.25,97,"a"])"));
  EXPECT_EQ(texts["input_token_ids_logprobs"], json::array());
  const json prompt_only = meta(R"("return_logprob":true,"sampling_params":{"max_new_tokens":0})");
  EXPECT_EQ(prompt_only["output_token_ids_logprobs"], json::array({row}));  // of the token after the prompt
  EXPECT_EQ(prompt_only["output_token_logprobs"], json::array());
  EXPECT_EQ(prompt_only["completion_tokens"], 0);
  const json without = meta(R"("return_logprob":false)");
  EXPECT_FALSE(without.contains("output_token_ids_logprobs"));
  EXPECT_TRUE(s.engine.last_request().sampling.token_ids_logprob.empty());
  const json none = post(s, "/generate", R"({"text":"a","return_logprob":true,"token_ids_logprob":[]})");
  EXPECT_FALSE(none["meta_info"].contains("output_token_ids_logprobs"));
}

TEST(Generate, AStreamRepeatsTheLogprobsOfListedIds) {
  TestServer s;
  const HttpAnswer answer = http_post(
      s.port, "/generate", R"({"text":"ab","stream":true,"return_logprob":true,"token_ids_logprob":[4]})");
  const auto events = parse_events(answer.body);
  ASSERT_EQ(events.size(), 4u);
  for (size_t i = 0; i < 3; ++i) {
    const json& rows = events[i]["meta_info"]["output_token_ids_logprobs"];
    EXPECT_EQ(rows.size(), i + 1);
    EXPECT_EQ(rows[i], json::parse("[[-1.0,4,null]]"));
  }
}

TEST(Generate, RoutedExperts) {
  TestServer s;
  const json list = post(s, "/generate", R"({"text":["a","b"],"return_routed_experts":true})");
  for (const json& answer : list) EXPECT_EQ(answer["meta_info"]["routed_experts"], "AAAAAAIBAAD/////");
  EXPECT_FALSE(post(s, "/generate", R"({"text":"a"})")["meta_info"].contains("routed_experts"));
}

TEST(Generate, RequestIds) {
  TestServer s;
  EXPECT_EQ(post(s, "/generate", R"({"text":"a","rid":"x"})")["meta_info"]["id"], "x");
  const json list = post(s, "/generate", R"({"text":["a","b"],"rid":["x","y"],"priority":3})");
  EXPECT_EQ(list[0]["meta_info"]["id"], "x");
  EXPECT_EQ(list[1]["meta_info"]["id"], "y");
  EXPECT_EQ(s.engine.last_request().priority, 3);
  EXPECT_EQ(post(s, "/generate", R"({"text":["a","b"],"rid":"z"})")[1]["meta_info"]["id"], "z-1");
  for (const char* body :
       {R"({"text":["a","b"],"rid":["x"]})", R"({"text":["a"],"rid":[]})", R"({"text":"a","rid":[]})",
        R"({"text":["a","b"],"rid":["x","x"]})", R"({"text":["a"],"rid":[""]})"}) {
    const HttpAnswer wrong = http_post(s.port, "/generate", body);
    EXPECT_EQ(wrong.status, 400) << body;
    EXPECT_EQ(json::parse(wrong.body)["error"]["param"], "rid") << body;
  }
}

TEST(Generate, SamplingFieldsReachTheEngine) {
  TestServer s;
  post(s, "/generate",
       R"({"text":"z","sampling_params":{"min_new_tokens":2,"sampling_seed":7,"presence_penalty":1,)"
       R"("logit_bias":{"97":-1.5}}})");
  const SamplingParams p = s.engine.last_request().sampling;
  EXPECT_EQ(p.min_new_tokens, 2);
  EXPECT_EQ(p.seed, 7u);
  EXPECT_EQ(p.presence_penalty, 1.0f);
  EXPECT_EQ(p.logit_bias.at(0).bias, -1.5f);
}

TEST(Generate, WrongFieldsAreNamed) {
  TestServer s;
  const std::pair<const char*, const char*> cases[] = {
      {R"({})", "text"},
      {R"({"text":"a","input_ids":[1]})", "text"},
      {R"({"text":5})", "text"},
      {R"({"input_ids":"abc"})", "input_ids"},
      {R"({"text":"a","sampling_params":5})", "sampling_params"},
      {R"({"text":"a","token_ids_logprob":"1"})", "token_ids_logprob"},
      {R"({"text":"a","token_ids_logprob":[1,-2]})", "token_ids_logprob"},
      {R"({"text":"a","token_ids_logprob":[[1]]})", "token_ids_logprob"},
      {R"({"text":["a"],"token_ids_logprob":[[1],[2]]})", "token_ids_logprob"},
      {R"({"text":["a"],"token_ids_logprob":[["x"]]})", "token_ids_logprob[0]"},
      {R"({"text":"a","sampling_params":[{}]})", "sampling_params"},
      {R"({"text":"a","sampling_params":{"max_new_tokens":"many"}})", "sampling_params.max_new_tokens"},
      {R"({"text":"a","sampling_params":{"top_p":0}})", "sampling_params.top_p"},
      {R"({"text":"a","stream":1})", "stream"},
  };
  for (const auto& [body, param] : cases) {
    const HttpAnswer answer = http_post(s.port, "/generate", body);
    EXPECT_EQ(answer.status, 400) << body << answer.body;
    EXPECT_EQ(json::parse(answer.body)["error"]["param"], param) << body;
  }
}

TEST(Operations, HealthFollowsTheLife) {
  ServerConfig config;
  config.port = 0;
  auto server = Server::make(config);
  ASSERT_TRUE(server.ok());
  const int port = (*server)->port();
  EXPECT_EQ(http_get(port, "/health").status, 503);
  EXPECT_EQ(http_post(port, "/generate", R"({"text":"a"})").status, 503);
  FakeEngine engine;
  (*server)->set_engine(engine);
  EXPECT_EQ(http_get(port, "/health").status, 200);
  (*server)->drain(5);
  EXPECT_EQ(http_get(port, "/health").status, 503);
  const HttpAnswer refused = http_post(port, "/generate", R"({"text":"a"})");
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(refused.headers.count("retry-after"), 1u);
  (*server)->stop();
}

TEST(Operations, TakenPortIsRefused) {
  TestServer s;
  ServerConfig config;
  config.port = s.port;
  const auto second = Server::make(config);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), StatusCode::kUnavailable);
  EXPECT_NE(second.status().message().find(std::to_string(s.port)), std::string::npos);
  config.port = 70000;
  EXPECT_EQ(Server::make(config).status().code(), StatusCode::kInvalidArgument);
  config.port = 0;
  config.host = "no.such.host.invalid";
  EXPECT_EQ(Server::make(config).status().code(), StatusCode::kInvalidArgument);
}

TEST(Operations, DrainFinishesWhatRuns) {
  TestServer s(FakeOptions{std::chrono::milliseconds(2)});
  HttpClient client(s.port);
  client.send(post_request("/generate",
                           R"({"text":"abc","sampling_params":{"max_new_tokens":50,"ignore_eos":true}})"));
  ASSERT_TRUE(eventually([&] { return s.engine.running() == 1; }));
  s.server->drain(10);
  const HttpAnswer answer = client.receive();
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(json::parse(answer.body)["meta_info"]["completion_tokens"], 50);
}

TEST(Operations, DrainAbortsAtTheDeadline) {
  TestServer s(FakeOptions{std::chrono::milliseconds(2)});
  HttpClient client(s.port);
  client.send(post_request(
      "/generate", R"({"text":"abc","sampling_params":{"max_new_tokens":1000000,"ignore_eos":true}})"));
  ASSERT_TRUE(eventually([&] { return s.engine.running() == 1; }));
  s.server->drain(0.05);
  const HttpAnswer answer = client.receive();
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(json::parse(answer.body)["meta_info"]["finish_reason"]["type"], "abort");
}

TEST(Operations, MetricsCountTokensAndLatencies) {
  TestServer s;
  post(s, "/generate", R"({"text":"abc"})");
  const HttpAnswer answer = http_get(s.port, "/metrics");
  EXPECT_EQ(answer.headers.at("content-type"), "text/plain; version=0.0.4; charset=utf-8");
  for (const char* line :
       {"sglang:generation_tokens_total{model_name=\"fake\"} 4\n",
        "sglang:num_requests_total{model_name=\"fake\"} 1\n",
        "sglang:time_to_first_token_seconds_count{model_name=\"fake\"} 1\n",
        "sglang:inter_token_latency_seconds_count{model_name=\"fake\"} 3\n",
        "sglang:e2e_request_latency_seconds_bucket{model_name=\"fake\",le=\"+Inf\"} 1\n",
        "# TYPE sglang:token_usage gauge\n", "# HELP sglang:token_usage Used share of the KV pool",
        "sglang:http_responses_total{model_name=\"fake\",status_code=\"200\"} 1\n",
        "# TYPE sglang:num_open_connections gauge\n"})
    EXPECT_NE(answer.body.find(line), std::string::npos) << line << answer.body;
}

TEST(Metrics, OfMovedExperts) {
  const Metrics metrics;
  ModelInfo info{.name = "m", .moves_experts = true};
  EngineStats stats;
  stats.expert_moves = {.num_rebalances = 3,
                        .num_experts = 20,
                        .num_bytes = 4096,
                        .seconds = 40.75,
                        .by_seconds = {1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1},
                        .imbalance_before = 1.5,
                        .imbalance_after = 1.0625};
  const std::string text = print_metrics(metrics, info, stats, {}, "p:");
  for (const char* line :
       {"# TYPE p:eplb_rebalances_total counter\n", "p:eplb_rebalances_total{model_name=\"m\"} 3\n",
        "p:eplb_moved_experts_total{model_name=\"m\"} 20\n",
        "p:eplb_moved_bytes_total{model_name=\"m\"} 4096\n",
        "p:eplb_imbalance_before{model_name=\"m\"} 1.5\n",
        "p:eplb_imbalance_after{model_name=\"m\"} 1.0625\n", "# TYPE p:eplb_rebalance_seconds histogram\n",
        "p:eplb_rebalance_seconds_bucket{model_name=\"m\",le=\"0.001\"} 1\n",
        "p:eplb_rebalance_seconds_bucket{model_name=\"m\",le=\"0.5\"} 1\n",
        "p:eplb_rebalance_seconds_bucket{model_name=\"m\",le=\"1\"} 2\n",
        "p:eplb_rebalance_seconds_bucket{model_name=\"m\",le=\"+Inf\"} 3\n",
        "p:eplb_rebalance_seconds_sum{model_name=\"m\"} 40.75\n",
        "p:eplb_rebalance_seconds_count{model_name=\"m\"} 3\n"})
    EXPECT_NE(text.find(line), std::string::npos) << line << text;
  info.moves_experts = false;
  EXPECT_EQ(print_metrics(metrics, info, stats, {}, "p:").find("eplb_"), std::string::npos);
}

TEST(Operations, MetricsOfTheProcess) {
  TestServer s;
  const std::string text = http_get(s.port, "/metrics").body;
  const auto value = [&](const std::string& name) {
    return std::stod(text.substr(text.find("\n" + name + " ") + name.size() + 2));
  };
  EXPECT_GT(value("process_resident_memory_bytes"), 1e6);
  EXPECT_LT(value("process_resident_memory_bytes"), value("process_virtual_memory_bytes"));
  EXPECT_GT(value("process_open_fds"), 3);
  EXPECT_LT(value("process_open_fds"), value("process_max_fds"));
  EXPECT_NEAR(value("process_start_time_seconds"), static_cast<double>(time(nullptr)), 1000);
  EXPECT_LT(value("process_cpu_seconds_total"), 1000);
}

TEST(Operations, MetricsPrefix) {
  ServerConfig config;
  config.metrics_prefix = "fp4moe_";
  TestServer s({}, config);
  EXPECT_NE(http_get(s.port, "/metrics").body.find("\nfp4moe_num_running_reqs{"), std::string::npos);
}

TEST(Generate, ATimeLimitIs503BeforeTheFirstTokenAnd504After) {
  TestServer s;
  const HttpAnswer waited = http_post(s.port, "/generate", R"({"text":"WAITED"})");
  EXPECT_EQ(waited.status, 503);
  EXPECT_EQ(waited.headers.count("retry-after"), 1u);
  const HttpAnswer late = http_post(s.port, "/generate", R"({"text":"LATE"})");
  EXPECT_EQ(late.status, 504);
  EXPECT_EQ(json::parse(late.body)["error"]["type"], "timeout");
}

TEST(Generate, TimeoutOfOneRequest) {
  TestServer s;
  post(s, "/generate", R"({"text":"abc","timeout":2.5})");
  EXPECT_EQ(s.engine.last_request().timeout_seconds, 2.5);
  post(s, "/v1/completions", R"({"prompt":"abc"})");
  EXPECT_EQ(s.engine.last_request().timeout_seconds, 0);
  const HttpAnswer bad = http_post(s.port, "/generate", R"({"text":"abc","timeout":-1})");
  EXPECT_EQ(bad.status, 400);
  EXPECT_EQ(json::parse(bad.body)["error"]["param"], "timeout");
}

TEST(Operations, FlushCache) {
  FakeOptions options;
  options.step = std::chrono::milliseconds(5);
  TestServer s(options);
  EXPECT_EQ(http_post(s.port, "/flush_cache", "").status, 200);
  const HttpAnswer get = http_get(s.port, "/flush_cache");  // an <img> in a page could request it
  EXPECT_EQ(get.status, 405);
  EXPECT_EQ(get.headers.at("allow"), "POST");
  EXPECT_EQ(s.engine.flushes(), 1);
  HttpClient client(s.port);
  client.send(post_request("/generate",
                           R"({"text":"abc","sampling_params":{"max_new_tokens":200,"ignore_eos":true}})"));
  ASSERT_TRUE(eventually([&] { return s.engine.running() == 1; }));
  EXPECT_EQ(http_post(s.port, "/flush_cache", "").status, 400);
  EXPECT_EQ(s.engine.flushes(), 1);
}

TEST(Operations, WeightsAreUpdatedFromDisk) {
  TestServer s;
  const auto update = [&](const std::string& body) {
    const HttpAnswer answer = http_post(s.port, "/update_weights_from_disk", body);
    const json parsed = json::parse(answer.body);
    EXPECT_EQ(parsed["success"], answer.status == 200) << answer.body;
    EXPECT_TRUE(parsed["message"].is_string() && parsed["num_paused_requests"].is_number()) << answer.body;
    return answer;
  };
  EXPECT_EQ(update(R"({"model_path":"/models/new","weight_version":"7"})").status, 200);
  const json info = json::parse(http_get(s.port, "/get_model_info").body);
  EXPECT_EQ(info["model_path"], "/models/new");
  EXPECT_EQ(info["weight_version"], "7");
  const HttpAnswer generated = http_post(s.port, "/generate", R"({"text":"a"})");
  EXPECT_EQ(json::parse(generated.body)["meta_info"]["weight_version"], "7");
  EXPECT_EQ(json::parse(http_get(s.port, "/server_info").body)["model_path"], "/models/new");
  EXPECT_EQ(update(R"({"model_path":"/models/new2"})").status, 200);
  EXPECT_EQ(s.engine.weight_source().version, "7") << "a version stays until it is replaced";
  for (const char* body : {R"({})", R"([])", R"({"model_path":1})", R"({"model_path":"/a","other":1})", "{",
                           R"({"model_path":"/a","flush_cache":false})", R"({"model_path":"/ABSENT"})"})
    EXPECT_EQ(update(body).status, 400) << body;
  EXPECT_EQ(s.engine.weight_source().model_path, "/models/new2");
  EXPECT_EQ(http_get(s.port, "/update_weights_from_disk").status, 405);
  const HttpAnswer lost = update(R"({"model_path":"/LOST"})");
  EXPECT_EQ(lost.status, 503);
  EXPECT_EQ(json::parse(lost.body)["message"], "rank 1: lost");
}

TEST(Operations, OnlyOneUpdateOfWeightsRunsAtATime) {
  TestServer s;
  const std::string slow = R"({"model_path":"/SLOW"})";
  auto first = std::async(std::launch::async,
                          [&] { return http_post(s.port, "/update_weights_from_disk", slow).status; });
  ASSERT_TRUE(eventually([&] { return s.engine.num_updates() == 1; }));
  EXPECT_EQ(http_post(s.port, "/update_weights_from_disk", slow).status, 409);
  s.engine.end_update();
  EXPECT_EQ(first.get(), 200);
  EXPECT_EQ(s.engine.num_updates(), 1);
}

TEST(Operations, RebalanceExperts) {
  TestServer s;
  EXPECT_EQ(http_get(s.port, "/rebalance_experts").status, 405);
  const HttpAnswer moved = http_post(s.port, "/rebalance_experts", "");
  EXPECT_EQ(moved.status, 200);
  EXPECT_EQ(json::parse(moved.body), json::parse(R"({"num_layers": 2, "num_experts": 5, "num_bytes": 4096,
      "imbalance_before": 1.5, "imbalance_after": 1.0625, "seconds": 0.25, "copy_seconds": 0.125})"));
  const HttpAnswer refused = http_post(s.port, "/rebalance_experts", "");
  EXPECT_EQ(refused.status, 400);
  EXPECT_EQ(json::parse(refused.body)["error"]["message"], "no experts to move");
}

TEST(Operations, ServerInfoAndItsOldName) {
  TestServer s;
  const json info = json::parse(http_get(s.port, "/server_info").body);
  EXPECT_EQ(info["served_model_name"], "fake");
  EXPECT_EQ(info["quantization"], "mxfp4");
  EXPECT_EQ(info["page_size"], 16);
  EXPECT_EQ(json::parse(http_get(s.port, "/get_server_info").body)["model_path"], "/models/fake");
}

TEST(Operations, UnknownRoutesAndMethods) {
  TestServer s;
  EXPECT_EQ(http_get(s.port, "/nope").status, 404);
  for (const char* path :
       {"/../etc/passwd", "/%2e%2e/etc/passwd", "/%00", "/health%00", "/health//", "//health",
        "/v1/models/%00", "/v1/models/..", "/v1/models//", "*", "http://localhost/nope"})
    EXPECT_EQ(http_get(s.port, path).status, 404) << path;
  EXPECT_EQ(http_get(s.port, "/health?deep=1").status, 200);
  const HttpAnswer answer = http_get(s.port, "/v1/chat/completions");
  EXPECT_EQ(answer.status, 405);
  EXPECT_EQ(answer.headers.at("allow"), "POST");
}

}  // namespace
}  // namespace fp4moe
