// Operator settings: keys, request logs, and the admin routes.
#include <cmath>

#include "server/server_fixture.h"

namespace fp4moe {
namespace {

using nlohmann::json;

const std::string kEndless =
    R"({"text":"abc","stream":true,"sampling_params":{"max_new_tokens":1000000000,"ignore_eos":true}})";

std::string bearer(const std::string& key) { return "Authorization: Bearer " + key + "\r\n"; }

int abort_status(const TestServer& s, const std::string& header) {
  return http_post(s.port, "/abort_request", R"({"rid":"x"})", header).status;
}

TEST(Keys, AreAskedForEverywhereButByProbesAndScrapers) {
  ServerConfig config;
  config.api_keys = {"secret", "other"};
  TestServer s({}, config);
  EXPECT_EQ(http_get(s.port, "/health").status, 200);
  EXPECT_EQ(http_get(s.port, "/metrics").status, 200);
  for (const std::string& header :
       {std::string(), bearer("wrong!"), bearer("secre"), bearer("secret2"), bearer(""),
        bearer("secretother"), std::string("Authorization: secret\r\n"),
        std::string("Authorization: Basic secret\r\n"), std::string("x-api-key: wrong\r\n"),
        std::string("x-api-key: \r\n")}) {
    const HttpAnswer answer = http_get(s.port, "/v1/models", header);
    EXPECT_EQ(answer.status, 401) << header;
    EXPECT_EQ(json::parse(answer.body)["error"]["code"], "invalid_api_key");
    EXPECT_EQ(answer.headers.at("www-authenticate"), "Bearer");
    EXPECT_EQ(http_get(s.port, "/nope", header).status, 401) << header;
    EXPECT_EQ(abort_status(s, header), 401) << header;
  }
  for (const std::string& header : {bearer("secret"), bearer("other"), std::string("x-api-key: secret\r\n"),
                                    std::string("authorization: bearer secret\r\n")}) {
    EXPECT_EQ(http_get(s.port, "/v1/models", header).status, 200) << header;
    EXPECT_EQ(abort_status(s, header), 200) << "without an admin key, client keys suffice: " << header;
  }
}

TEST(Keys, OfOperatorsAreForTheirRoutesAlone) {
  ServerConfig config;
  config.admin_api_keys = {"admin"};
  {
    TestServer s({}, config);
    EXPECT_EQ(http_get(s.port, "/v1/models").status, 200);
    EXPECT_EQ(abort_status(s, ""), 401);
    EXPECT_EQ(abort_status(s, bearer("admin")), 200);
  }
  config.api_keys = {"client"};
  TestServer s({}, config);
  EXPECT_EQ(http_get(s.port, "/v1/models", bearer("admin")).status, 401);
  EXPECT_EQ(http_get(s.port, "/v1/models", bearer("client")).status, 200);
  EXPECT_EQ(abort_status(s, bearer("client")), 401);
  EXPECT_EQ(abort_status(s, bearer("admin")), 200);
}

// A client is identified by its key if keys are set, otherwise by its address. Headers alone do not change
// its identity.
TEST(Keys, TellClientsApart) {
  const auto client_with = [](TestServer& s, const std::string& header) {
    EXPECT_EQ(http_post(s.port, "/generate", R"({"text":"a","sampling_params":{"max_new_tokens":1}})", header)
                  .status,
              200);
    return s.engine.last_request().client;
  };
  TestServer open;
  EXPECT_EQ(client_with(open, ""), "address 127.0.0.1");
  EXPECT_EQ(client_with(open, bearer("any")), "address 127.0.0.1");
  ServerConfig config;
  config.api_keys = {"secret", "other"};
  TestServer s({}, config);
  EXPECT_EQ(client_with(s, bearer("secret")), "key 0");
  EXPECT_EQ(client_with(s, "x-api-key: other\r\n"), "key 1");
}

TEST(Keys, ThatNoHeaderCanCarryAreRefusedAndNotShown) {
  for (const std::string& key : {std::string(), std::string("a b"), std::string("a\n"),
                                 std::string("\xC3\xA4"), std::string(5000, 'k')}) {
    ServerConfig config;
    config.port = 0;
    config.admin_api_keys = {"good", key};
    const auto server = Server::make(config);
    ASSERT_FALSE(server.ok()) << key;
    EXPECT_EQ(server.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(server.status().message().find(std::to_string(key.size()) + " bytes"), std::string::npos);
    if (key.size() > 1) {
      EXPECT_EQ(server.status().message().find(key), std::string::npos);
    }
  }
}

TEST(Operations, TimesThatAreNoTimesAreRefusedByName) {
  for (const auto& [name, field] : {std::pair{"idle_timeout_seconds", &ServerConfig::idle_timeout_seconds},
                                    {"request_timeout_seconds", &ServerConfig::request_timeout_seconds},
                                    {"write_timeout_seconds", &ServerConfig::write_timeout_seconds},
                                    {"keep_alive_seconds", &ServerConfig::keep_alive_seconds}})
    for (const double seconds : {std::nan(""), -1.0, 1e300}) {
      ServerConfig config{.port = 0};
      config.*field = seconds;
      const Status status = Server::make(config).status();
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_NE(status.message().find(name), std::string::npos) << status.message();
    }
}

TEST(Operations, SinksMayThrow) {
  FakeEngine engine;
  ServerConfig config{.port = 0};
  config.log_sink = [](LogLevel, const std::string&) { throw 1; };
  config.request_sink = [](const std::string&, const std::string&) { throw 1; };
  auto server = Server::make(config);
  ASSERT_TRUE(server.ok()) << server.status().to_string();
  (*server)->set_engine(engine);
  const char* body =
      R"({"text":"abc","no_such_field":1,"sampling_params":{"max_new_tokens":2}})";  // is logged
  EXPECT_EQ(http_post((*server)->port(), "/generate", body).status, 200);
  (*server)->stop();
}

TEST(AbortRequest, EndsTheNamedOneAlone) {
  TestServer s(FakeOptions{std::chrono::milliseconds(1)});
  HttpClient one(s.port), two(s.port);
  one.send(post_request("/generate", kEndless));
  ASSERT_TRUE(eventually([&] { return s.engine.running() == 1; }));
  const std::string id = s.engine.last_request().id;
  two.send(post_request("/generate", R"({"text":["a","b"],"sampling_params":{"max_new_tokens":1000000000,)"
                                     R"("ignore_eos":true}})"));
  ASSERT_TRUE(eventually([&] { return s.engine.running() == 3; }));
  std::string both = s.engine.last_request().id;
  both.resize(both.rfind('-'));
  const auto abort = [&](const json& body) { return http_post(s.port, "/abort_request", body.dump()); };
  EXPECT_EQ(abort({{"rid", "unknown"}}).body, R"({"num_aborted":0})");
  EXPECT_EQ(abort({{"rid", id.substr(0, id.size() - 1)}}).body, R"({"num_aborted":0})");
  EXPECT_EQ(s.engine.running(), 3);
  EXPECT_EQ(abort({{"rid", id}}).body, R"({"num_aborted":1})");
  EXPECT_EQ(parse_events(one.receive().body).rbegin()[1]["meta_info"]["finish_reason"]["type"], "abort");
  EXPECT_TRUE(eventually([&] { return s.engine.running() == 2; }));
  EXPECT_EQ(abort({{"rid", both}}).body, R"({"num_aborted":2})");
  EXPECT_EQ(json::parse(two.receive().body)[1]["meta_info"]["finish_reason"]["type"], "abort");
}

// Clients choose ids, so one client's id can look like a part of another client's request.
TEST(AbortRequest, EndsNoneOfAnotherClient) {
  TestServer s(FakeOptions{std::chrono::milliseconds(1)});
  const auto start = [&](HttpClient& client, const char* id, int n) {
    const int64_t before = s.engine.running();
    client.send(post_request(
        "/generate",
        json{{"text", "a"},
             {"rid", id},
             {"sampling_params", {{"max_new_tokens", 1000000000}, {"ignore_eos", true}, {"n", n}}}}
            .dump()));
    ASSERT_TRUE(eventually([&] { return s.engine.running() == before + n; }));
  };
  HttpClient one(s.port), two(s.port), three(s.port), four(s.port);
  start(one, "job", 2);
  start(two, "job-17", 1);
  start(three, "job-17-1", 1);
  start(four, "job-2", 2);
  const auto abort = [&](const char* id) {
    return http_post(s.port, "/abort_request", json{{"rid", id}}.dump()).body;
  };
  EXPECT_EQ(abort("jo"), R"({"num_aborted":0})");
  EXPECT_EQ(abort("job"), R"({"num_aborted":2})");
  EXPECT_TRUE(eventually([&] { return s.engine.running() == 4; }));
  EXPECT_EQ(abort("job-17"), R"({"num_aborted":1})");
  EXPECT_EQ(abort("job-2-0"), R"({"num_aborted":1})") << "each part must have a separate id";
  EXPECT_TRUE(eventually([&] { return s.engine.running() == 2; }));
  EXPECT_EQ(abort("job-2"), R"({"num_aborted":1})");
  EXPECT_EQ(abort("job-17-1"), R"({"num_aborted":1})");
}

TEST(AbortRequest, EndsAllAndWantsAnId) {
  TestServer s(FakeOptions{std::chrono::milliseconds(1)});
  HttpClient one(s.port), two(s.port);
  for (HttpClient* client : {&one, &two}) client->send(post_request("/generate", kEndless));
  ASSERT_TRUE(eventually([&] { return s.engine.running() == 2; }));
  for (const char* body : {"{}", R"({"rid":""})", R"({"rid":7})", R"({"abort_all":"yes"})", "[]"})
    EXPECT_EQ(http_post(s.port, "/abort_request", body).status, 400) << body;
  EXPECT_EQ(http_post(s.port, "/abort_request", R"({"abort_all":true})").body, R"({"num_aborted":2})");
  EXPECT_TRUE(eventually([&] { return s.engine.running() == 0; }));
}

// The log events of one request at `level`.
std::vector<json> request_log(int level, const std::string& body) {
  std::mutex mutex;
  std::vector<json> events;
  ServerConfig config;
  config.log_requests_level = level;
  config.request_sink = [&](const std::string& event, const std::string& fields) {
    std::lock_guard<std::mutex> lock(mutex);
    events.push_back(json::parse(fields));
    events.back()["event"] = event;
  };
  TestServer s({}, config);
  http_post(s.port, "/generate", body);
  s.server->stop();
  return events;
}

TEST(RequestLog, TellsMoreByLevel) {
  const std::string text(3000, 'x');
  const std::string body =
      json{{"text", text}, {"sampling_params", {{"temperature", 0.5}, {"seed", 7}}}}.dump();
  for (int level = 0; level <= 3; ++level) {
    const std::vector<json> events = request_log(level, body);
    ASSERT_EQ(events.size(), 2u);
    const json &received = events[0], &finished = events[1];
    EXPECT_EQ(received["event"], "request.received");
    EXPECT_EQ(finished["event"], "request.finished");
    EXPECT_EQ(received["path"], "/generate");
    EXPECT_EQ(received["prompt_tokens"], json::array({3000}));
    EXPECT_EQ(received["rid"][0], finished["choices"][0]["rid"]);
    EXPECT_EQ(finished["choices"][0]["finish_reason"], "length");
    EXPECT_EQ(finished["choices"][0]["completion_tokens"], 128);
    EXPECT_EQ(received.contains("sampling_params"), level >= 1);
    if (level >= 1) {
      EXPECT_EQ(received["sampling_params"]["seed"], 7);
    }
    EXPECT_EQ(received.contains("body"), level >= 2);
    EXPECT_EQ(finished["choices"][0].contains("text"), level >= 2);
    if (level == 2) {
      EXPECT_EQ(received["body"].get<std::string>().size(), 2048 + 3u);
    }
    if (level == 3) {
      EXPECT_EQ(received["body"], body);
    }
  }
}

TEST(RequestLog, SaysWhatFailed) {
  const std::vector<json> events = request_log(0, R"({"text":"FAIL"})");
  ASSERT_EQ(events.size(), 2u);
  EXPECT_FALSE(events[1]["error"].get<std::string>().empty());
  EXPECT_EQ(request_log(3, R"({"text":5})").size(), 0u) << "refused requests must not be logged";
}

std::string from(const std::string& origin) { return "Origin: " + origin + "\r\n"; }

TEST(Cors, AnswersTheListedOriginsAlone) {
  ServerConfig config;
  config.cors_allow_origins = {"https://a.example", "http://b.example:8080"};
  config.api_keys = {"secret"};
  TestServer s({}, config);
  for (const std::string& origin : config.cors_allow_origins) {
    const HttpAnswer answer = http_get(s.port, "/health", from(origin));
    EXPECT_EQ(answer.headers.at("access-control-allow-origin"), origin);
    EXPECT_EQ(answer.headers.at("vary"), "Origin");
  }
  for (const std::string& header :
       {std::string(), from("https://evil.example"), from("https://a.example.evil"), from("null"), from("*")})
    EXPECT_EQ(http_get(s.port, "/health", header).headers.count("access-control-allow-origin"), 0u) << header;
  // Also in error responses, so that the page can read them, and in streams.
  EXPECT_EQ(
      http_get(s.port, "/v1/models", from("https://a.example")).headers.count("access-control-allow-origin"),
      1u);
  const std::string header = from("https://a.example") + bearer("secret");
  const HttpAnswer stream = http_post(s.port, "/generate", R"({"text":"a","stream":true})", header);
  EXPECT_EQ(stream.headers.at("content-type"), "text/event-stream; charset=utf-8");
  EXPECT_EQ(stream.headers.at("access-control-allow-origin"), "https://a.example");
}

TEST(Cors, PreflightNeedsNoKey) {
  ServerConfig config;
  config.cors_allow_origins = {"*"};
  config.api_keys = {"secret"};
  TestServer s({}, config);
  HttpClient client(s.port);
  client.send(
      "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: https://a.example\r\n"
      "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization,x-y\r\n\r\n");
  const HttpAnswer answer = client.receive();
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(answer.headers.at("access-control-allow-origin"), "*");
  EXPECT_EQ(answer.headers.at("access-control-allow-methods"), "GET, HEAD, POST, DELETE");
  EXPECT_EQ(answer.headers.at("access-control-allow-headers"), "authorization,x-y");
  client.send(get_request("/health"));
  EXPECT_EQ(client.receive().status, 200) << "the connection must stay open";
}

TEST(Cors, IsOffUnlessAskedForAndWantsOrigins) {
  TestServer s;
  EXPECT_EQ(
      http_get(s.port, "/health", from("https://a.example")).headers.count("access-control-allow-origin"),
      0u);
  HttpClient client(s.port);
  client.send("OPTIONS /generate HTTP/1.1\r\nHost: localhost\r\nOrigin: https://a.example\r\n\r\n");
  EXPECT_EQ(client.receive().status, 403);
  for (const char* origin :
       {"a.example", "https://a.example/", "https://", "://a", "https://*.a.example", ""}) {
    ServerConfig config;
    config.port = 0;
    config.cors_allow_origins = {origin};
    EXPECT_EQ(Server::make(config).status().code(), StatusCode::kInvalidArgument) << origin;
  }
}

TEST(Health, GeneratesAToken) {
  ServerConfig config;
  config.api_keys = {"secret"};
  TestServer s({}, config);
  EXPECT_EQ(http_get(s.port, "/health_generate").status, 401)
      << "the route generates a token, so it needs the key";
  EXPECT_EQ(http_get(s.port, "/health_generate", bearer("secret")).body, R"({"status":"ok"})");
  EXPECT_EQ(s.engine.last_request().sampling.max_new_tokens, 1);
  s.server->drain(1);
  EXPECT_EQ(http_get(s.port, "/health_generate", bearer("secret")).status, 503);
}

}  // namespace
}  // namespace fp4moe
