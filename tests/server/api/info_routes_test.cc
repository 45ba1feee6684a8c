// Routes that report the model, the server and its load; the names of routes and models.
#include "server/api/openai_requests.h"
#include "server/server_fixture.h"

namespace fp4moe {
namespace {

using nlohmann::json;

json get(const TestServer& s, const std::string& path) {
  const HttpAnswer answer = http_get(s.port, path);
  EXPECT_EQ(answer.status, 200) << path << answer.body;
  return body_of(answer);
}

json get_keys(const json& object) {
  json keys = json::array();
  for (const auto& item : object.items()) keys.push_back(item.key());
  return keys;
}

std::string completion_of(const std::string& model) { return R"({"prompt":"ab","model":")" + model + "\"}"; }

TEST(Models, ListAndOne) {
  TestServer s;
  const auto now = static_cast<double>(std::time(nullptr));
  const json list = get(s, "/v1/models");
  EXPECT_EQ(list["object"], "list");
  ASSERT_EQ(list["data"].size(), 1u);
  const json card = list["data"][0];
  EXPECT_EQ(card["id"], "fake");
  EXPECT_EQ(card["root"], "/models/fake");
  EXPECT_EQ(card["max_model_len"], 4096);
  EXPECT_NEAR(card["created"].get<double>(), now, 100);
  for (const char* path : {"/v1/models/fake", "/models/fake", "/v1/models/fake/", "/v1/models/f%61ke"})
    EXPECT_EQ(get(s, path), card) << path;
  for (const char* path : {"/v1/models/other", "/v1/models/%00", "/v1/models/%FF", "/v1/models/fake%2F"})
    EXPECT_EQ(http_get(s.port, path).status, 404) << path;
}

TEST(Models, EachNameIsListedAndAccepted) {
  FakeOptions options;
  options.aliases = {"org/name", "fake", "b"};
  TestServer s(options);
  const json list = get(s, "/v1/models");
  ASSERT_EQ(list["data"].size(), 3u);
  EXPECT_EQ(list["data"][1]["id"], "org/name");
  EXPECT_EQ(get(s, "/v1/models/org%2Fname"), list["data"][1]);
  EXPECT_EQ(get(s, "/v1/models/org/name"), list["data"][1]);
  for (const char* model : {"fake", "org/name", "b", "default", "/models/fake", ""}) {
    const HttpAnswer answer = http_post(s.port, kText, completion_of(model));
    ASSERT_EQ(answer.status, 200) << model << answer.body;
    EXPECT_EQ(body_of(answer)["model"], "fake") << model;
  }
  const HttpAnswer unknown = http_post(s.port, kText, completion_of("gpt-4o"));
  EXPECT_EQ(unknown.status, 404);
  EXPECT_EQ(body_of(unknown)["error"]["message"],
            R"(model: "gpt-4o" is not served here; the served models are "fake", "org/name", "b")");
}

TEST(Models, AnyNameIsAcceptedOnRequest) {
  ServerConfig config;
  config.accept_any_model_name = true;
  TestServer s({}, config);
  EXPECT_EQ(body_of(http_post(s.port, kText, completion_of("gpt-4o")))["model"], "fake");
  EXPECT_EQ(http_post(s.port, "/tokenize", completion_of("gpt-4o")).status, 200);
  EXPECT_EQ(http_post(s.port, kText, R"({"prompt":"a","model":5})").status, 400);
  EXPECT_EQ(http_get(s.port, "/v1/models/gpt-4o").status, 404);
}

TEST(Info, ModelInfo) {
  TestServer s;
  const json info = get(s, "/model_info");
  EXPECT_EQ(info["model_path"], "/models/fake");
  EXPECT_EQ(info["tokenizer_path"], "/models/fake/tokenizer");
  EXPECT_EQ(info["is_generation"], true);
  EXPECT_EQ(info["preferred_sampling_params"], nullptr);
  EXPECT_EQ(info["weight_version"], "default");
  EXPECT_EQ(info["architectures"], json::array({"FakeForCausalLM"}));
  EXPECT_EQ(get(s, "/get_model_info"), info);
}

TEST(Info, Version) {
  TestServer s;
  const json version = get(s, "/version");
  EXPECT_EQ(get_keys(version), json::array({"version"}));
  EXPECT_EQ(version["version"], get(s, "/server_info")["version"]);
}

TEST(Info, Load) {
  TestServer s(FakeOptions{std::chrono::milliseconds(2)});
  EXPECT_EQ(get(s, "/get_load"),
            json::parse(R"([{"dp_rank":0,"num_reqs":0,"num_waiting_reqs":0,"num_tokens":0}])"));
  HttpClient client(s.port);
  client.send(post_request(
      "/generate", R"({"text":"abc","sampling_params":{"max_new_tokens":100000,"ignore_eos":true}})"));
  ASSERT_TRUE(eventually([&] { return s.engine.running() == 1; }));
  EXPECT_EQ(get(s, "/get_load")[0]["num_reqs"], 1);
  for (const char* path : {"/v1/loads", "/loads", "/v1/loads?include=core"}) {
    const json loads = get(s, path);
    EXPECT_TRUE(loads["timestamp"].is_string());
    ASSERT_EQ(loads["loads"].size(), 1u);
    const json& load = loads["loads"][0];
    EXPECT_EQ(load["dp_rank"], 0);
    EXPECT_EQ(load["num_running_reqs"], 1);
    EXPECT_EQ(load["num_waiting_reqs"], 0);
    EXPECT_EQ(load["max_total_num_tokens"], 8192);
    EXPECT_EQ(load["max_running_requests"], 64);
    EXPECT_EQ(load["queues"], json::parse(R"({"waiting":0,"grammar":0,"retracted":0})"));
  }
}

TEST(Info, Props) {
  FakeOptions options;
  options.chat_template = "{{ messages }}";
  TestServer s(options);
  const json props = get(s, "/props");
  EXPECT_EQ(props["default_generation_settings"]["n_ctx"], 4096);
  EXPECT_EQ(props["default_generation_settings"]["params"]["temperature"], 0);
  EXPECT_EQ(props["total_slots"], 64);
  EXPECT_EQ(props["chat_template"], "{{ messages }}");
  EXPECT_EQ(props["model_path"], "/models/fake");
  EXPECT_EQ(props["model_alias"], "fake");
  EXPECT_EQ(props["endpoint_slots"], false);
  EXPECT_EQ(props["build_info"].get<std::string>().rfind("fp4moe ", 0), 0u);
}

TEST(Info, SlotsAreRefusedByName) {
  TestServer s;
  const HttpAnswer answer = http_get(s.port, "/slots");
  EXPECT_EQ(answer.status, 404);
  EXPECT_NE(answer.body.find("no slots"), std::string::npos);
}

TEST(Ping, IsHealthWithoutABody) {
  ServerConfig config;
  config.port = 0;
  config.api_keys = {"key"};
  auto server = Server::make(config);
  ASSERT_TRUE(server.ok());
  const int port = (*server)->port();
  EXPECT_EQ(http_get(port, "/ping").status, 503);
  FakeEngine engine;
  (*server)->set_engine(engine);
  const HttpAnswer answer = http_get(port, "/ping");
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(answer.body, "");
  EXPECT_EQ(answer.headers.at("content-length"), "0");
  EXPECT_EQ(http_post(port, "/ping", "").status, 405);
  EXPECT_EQ(http_get(port, "/version").status, 401) << "only probes are open";
  (*server)->stop();
}

TEST(Openapi, HasTheRoutesOfOperatorsAndPages) {
  TestServer s;
  const json paths = get(s, "/openapi.json")["paths"];
  for (const char* path : {"/", "/chat", "/slots", "/get_server_info"})
    EXPECT_TRUE(paths.contains(path) && paths[path].contains("get")) << path;
  for (const char* path : {"/flush_cache", "/rebalance_experts", "/update_weights_from_disk"})
    EXPECT_TRUE(paths.contains(path) && paths[path].contains("post")) << path;
}

TEST(Routes, HaveTwoNamesEach) {
  TestServer s;
  for (const char* path : {"/v1/chat/completions", "/chat/completions", "/chat/completions/"})
    EXPECT_EQ(http_post(s.port, path, chat("ab")).status, 200) << path;
  for (const char* path : {"/completions", "/v1/completions/", "/v1/generate"})
    EXPECT_EQ(http_post(s.port, path, R"({"prompt":"ab","text":"ab"})").status, 200) << path;
  for (const char* path :
       {"/models", "/v1/health", "/health/", "/v1/metrics", "/openapi.json/", "/chat/", "/"})
    EXPECT_EQ(http_get(s.port, path).status, 200) << path;
  for (const char* path : {"/messages", "/messages/count_tokens/"})
    EXPECT_EQ(
        http_post(s.port, path, R"({"messages":[{"role":"user","content":"ab"}],"max_tokens":2})").status,
        200)
        << path;
  const json stored = body_of(http_post(s.port, "/responses/", R"({"input":"ab"})"));
  for (const char* path : {"/responses/", "/v1/responses/"})
    EXPECT_EQ(get(s, path + stored["id"].get<std::string>())["id"], stored["id"]) << path;
  EXPECT_EQ(http_get(s.port, "/chat/completions/").headers.at("allow"), "POST");
  for (const char* path : {"/v1/chat", "/v1", "/v1/", "/v1/nope", "/v1/v1/models"})
    EXPECT_EQ(http_get(s.port, path).status, 404) << path;
}

TEST(Routes, OtherNamesNeedTheSameKeys) {
  ServerConfig config;
  config.api_keys = {"key"};
  config.admin_api_keys = {"admin"};
  TestServer s({}, config);
  const std::string client = "Authorization: Bearer key\r\n", admin = "Authorization: Bearer admin\r\n";
  EXPECT_EQ(http_get(s.port, "/models/").status, 401);
  EXPECT_EQ(http_get(s.port, "/models/", client).status, 200);
  for (const char* path : {"/v1/flush_cache", "/flush_cache/", "/v1/flush_cache/"}) {
    EXPECT_EQ(http_post(s.port, path, "", client).status, 401) << path;
    EXPECT_EQ(http_post(s.port, path, "", admin).status, 200) << path;
  }
}

}  // namespace
}  // namespace fp4moe
