// A router whose nodes answer its probes with arbitrary bytes reports why a node is down. Also its routes,
// limits and shutdown.
#include <algorithm>
#include <chrono>

#include "server/router/router_fixture.h"

namespace fp4moe {
namespace {

using nlohmann::json;
using std::string_literals::operator""s;

// ---- /server_info and /health ---------------------------------------------------------------------

struct BadAnswer {
  const char* name;
  FakeNode::Script script;
  const char* reason;  // part of the reported problem
};

FakeNode::Script body(const std::string& text) { return bytes(http_answer(text)); }

std::string info_with(const std::string& fields) { return "{" + fields + "}"; }

// Responses that are malformed only for /server_info: with status 200, any body of /health is valid.
std::vector<BadAnswer> bad_infos() {
  const std::string mode = R"("disaggregation_mode":"prefill",)";
  const char* const not_an_object = "its /server_info is not a JSON object";
  return {
      {"mode null", body(info_with(R"("disaggregation_mode":null)")),
       "--disaggregation-mode null but is configured as --prefill"},
      {"mode number", body(info_with(R"("disaggregation_mode":7)")),
       R"(has disaggregation_mode 7; it must be "null", "prefill" or "decode")"},
      {"mode true", body(info_with(R"("disaggregation_mode":true)")), "has disaggregation_mode true;"},
      {"mode array", body(info_with(R"("disaggregation_mode":["prefill"])")),
       "has disaggregation_mode of type array;"},
      {"mode object", body(info_with(R"("disaggregation_mode":{"a":1})")),
       "has disaggregation_mode of type object;"},
      {"mode with escapes", body(info_with("\"disaggregation_mode\":\"\\u001b[31m\\nprefill\"")),
       R"(mode \x1b[31m\nprefill but)"},
      {"mode of 900 KB", body(info_with("\"disaggregation_mode\":\"" + std::string(900000, 'x') + "\"")),
       "xxx... but is configured"},
      {"no fields", body("{}"), "--disaggregation-mode null"},
      {"port as text", body(info_with(mode + R"("disaggregation_bootstrap_port":"8998")")),
       R"(has disaggregation_bootstrap_port "8998"; it must be an integer in 0..65535)"},
      {"port of 65536", body(info_with(mode + R"("disaggregation_bootstrap_port":65536)")),
       "has disaggregation_bootstrap_port 65536;"},
      {"port below 0", body(info_with(mode + R"("disaggregation_bootstrap_port":-1)")),
       "has disaggregation_bootstrap_port -1;"},
      {"port of 1e300", body(info_with(mode + R"("disaggregation_bootstrap_port":1e300)")),
       "has disaggregation_bootstrap_port 1e+300;"},
      {"port of 2^64", body(info_with(mode + R"("disaggregation_bootstrap_port":18446744073709551616)")),
       "has disaggregation_bootstrap_port 1.8446744073709552e+19;"},
      {"port array", body(info_with(mode + R"("disaggregation_bootstrap_port":[[]])")),
       "has disaggregation_bootstrap_port of type array;"},
      {"port 0", body(info_with(mode + R"("disaggregation_bootstrap_port":0)")),
       "has no disaggregation_bootstrap_port;"},
      {"no port", body(info_with(R"("disaggregation_mode":"prefill")")),
       "has no disaggregation_bootstrap_port;"},
      {"null", body("null"), not_an_object},
      {"array", body("[]"), not_an_object},
      {"text", body("\"x\""), not_an_object},
      {"empty", body(""), not_an_object},
      {"no JSON", body("<html>\x1b[2J"), R"(is not a JSON object: "<html>\x1b[2J")"},
      {"bad UTF-8", body("{\"disaggregation_mode\":\"\xff\xfe\"}"), not_an_object},
      {"deep arrays", body(std::string(500000, '[')), not_an_object},
      {"deep objects", body("{\"a\":" + std::string(200000, '[') + std::string(200000, ']') + "}"),
       not_an_object},
      {"status 500", bytes(http_answer("{}", 500)), "/server_info returned status 500"},
      {"status 302", bytes(http_answer("{}", 302)), "/server_info returned status 302"},
  };
}

// Responses that are malformed on any route.
std::vector<BadAnswer> bad_responses() {
  const char* const not_http = "its response is not HTTP/1.1";
  const char* const cut = "the connection was closed before the end of the response";
  const char* const late = "its response is incomplete after 0.4 s";
  const char* const long_head = "a header of its response has more than 16384 bytes";
  return {
      {"status 100", bytes("HTTP/1.1 100 Continue\r\n\r\n"),
       "its response has status 100; it must be 200 to 599"},
      {"status 999", bytes(http_answer("{}", 999)), "its response has status 999; it must be 200 to 599"},
      {"a banner", bytes("SSH-2.0-OpenSSH_9.2\x1b[31m\r\n"), not_http},
      {"zeros", bytes(std::string(4096, '\0')), not_http},
      {"a long line", bytes(std::string(1 << 20, 'x')), not_http},
      {"a long header", bytes("HTTP/1.1 200 OK\r\nX: " + std::string(100000, 'y')), long_head},
      {"many headers",
       [](FakePeer& peer) { peer.send("HTTP/1.1 200 OK\r\n") && peer.send_forever("X: y\r\n"); }, long_head},
      {"a bad length", bytes("HTTP/1.1 200 OK\r\nContent-Length: 5x\r\n\r\nhello"), not_http},
      {"a bad chunk", bytes("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), not_http},
      {"a huge chunk", bytes("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nx"),
       not_http},
      {"a long chunk head",
       bytes("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;" + std::string(200000, 'e')),
       long_head},
      {"closed at once", bytes(""), cut},
      {"reset at once", [](FakePeer& peer) { peer.reset(); }, "reset"},
      {"half a head", bytes("HTTP/1.1 200 OK\r\nContent-"), cut},
      {"half a body", bytes("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"disagg"), cut},
      {"half a chunk", bytes("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\n{\"disagg"), cut},
      {"nothing", [](FakePeer& peer) { peer.wait_until_closed(); }, late},
      {"a dripping head",
       [](FakePeer& peer) { peer.drip("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"s); }, late},
      {"a dripping body",
       [](FakePeer& peer) { peer.send("HTTP/1.1 200 OK\r\n\r\n{") && peer.drip(std::string(1000, ' ')); },
       late},
      {"a body of 1 TB",
       [](FakePeer& peer) {
         peer.send("HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n") &&
             peer.send_forever(std::string(65536, ' '));
       },
       "its response has more than 1048576 bytes"},
      {"endless chunks",
       [](FakePeer& peer) {
         peer.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n") &&
             peer.send_forever(chunk(std::string(4000, ' ')));
       },
       "its response has more than 1048576 bytes"},
  };
}

TEST_F(RouterWithFakeNodes, ANodeWhoseAnswerIsMalformedIsDownAndSaysWhy) {
  start();
  ASSERT_TRUE(eventually([&] { return is_healthy(); }));
  std::vector<BadAnswer> cases = bad_infos();
  for (BadAnswer& bad : bad_responses()) cases.push_back(std::move(bad));
  for (const BadAnswer& bad : cases) {
    SCOPED_TRACE(bad.name);
    // Take the node down, so that the router reads its /server_info again.
    prefill_.set_bytes("/health", http_answer("{}", 503));
    ASSERT_TRUE(eventually([&] { return worker("prefill").at("problem") == "/health returned status 503"; }));
    prefill_.set("/server_info", bad.script);
    prefill_.set_body("/health", "{}");
    std::string problem;
    EXPECT_TRUE(eventually([&] {
      problem = worker("prefill").at("problem").get<std::string>();
      return problem.find(bad.reason) != std::string::npos;
    })) << problem;
    EXPECT_FALSE(worker("prefill").at("is_up").get<bool>());
    EXPECT_LT(problem.size(), 400u);
    const auto is_plain = [](char c) { return c >= ' ' && c < '\x7f'; };
    EXPECT_TRUE(std::all_of(problem.begin(), problem.end(), is_plain)) << problem;
    EXPECT_EQ(http_get(router_->port(), "/health").status, 503);
    EXPECT_TRUE(worker("decode").at("is_up").get<bool>());
  }
  prefill_.set_body("/server_info",
                    R"({"disaggregation_mode":"prefill","disaggregation_bootstrap_port":8998})");
  EXPECT_TRUE(eventually([&] { return is_healthy(); }));
  EXPECT_EQ(worker("prefill").at("bootstrap_port"), 8998);
}

TEST_F(RouterWithFakeNodes, ANodeWhoseHealthIsMalformedIsDownAndSaysWhy) {
  start();
  for (const BadAnswer& bad : bad_responses()) {
    SCOPED_TRACE(bad.name);
    decode_.set_bytes("/health", http_answer("{}", 503));
    ASSERT_TRUE(eventually([&] { return worker("decode").at("problem") == "/health returned status 503"; }));
    decode_.set("/health", bad.script);
    std::string problem;
    EXPECT_TRUE(eventually([&] {
      problem = worker("decode").at("problem").get<std::string>();
      return problem.find(bad.reason) != std::string::npos;
    })) << problem;
    EXPECT_EQ(http_get(router_->port(), "/health").status, 503);
  }
  decode_.set_body("/health", "{}");
  EXPECT_TRUE(eventually([&] { return is_healthy(); }));
}

// ---- routes ---------------------------------------------------------------------------------------

TEST_F(RouterWithFakeNodes, OperatorsRoutesAreNotPassedOn) {
  start();
  ASSERT_TRUE(eventually([&] { return is_healthy(); }));
  const std::pair<const char*, const char*> not_passed[] = {{"GET", "/flush_cache"},
                                                            {"HEAD", "/flush_cache"},
                                                            {"POST", "/flush_cache"},
                                                            {"GET", "/abort_request"},
                                                            {"POST", "/abort_request"},
                                                            {"GET", "/flush_cache/"},
                                                            {"GET", "//flush_cache"},
                                                            {"GET", "/v1/models/../flush_cache"},
                                                            {"GET", "/%66lush_cache"},
                                                            {"GET", "/flush_cache?x"},
                                                            {"POST", "/abort_request?abort_all=true"},
                                                            {"PUT", "/flush_cache"},
                                                            {"GET", "/unknown"}};
  for (const auto& [method, path] : not_passed) {
    HttpClient client(router_->port());
    client.send(method + " "s + path +
                " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
    if (method != "HEAD"s) {
      EXPECT_EQ(client.receive().status, 404) << method << " " << path;
    } else {
      EXPECT_TRUE(client.receive_until("HTTP/1.1 404")) << path;
    }
    EXPECT_EQ(decode_.count(path), 0) << method << " " << path;
    EXPECT_EQ(prefill_.count(path), 0) << method << " " << path;
  }
  const std::pair<const char*, const char*> passed[] = {{"POST", "/v1/chat/completions"},
                                                        {"POST", "/v1/completions"},
                                                        {"POST", "/generate"},
                                                        {"POST", "/tokenize"},
                                                        {"POST", "/detokenize"},
                                                        {"POST", "/apply-template"},
                                                        {"GET", "/model_info"},
                                                        {"GET", "/get_model_info"},
                                                        {"GET", "/version"},
                                                        {"GET", "/props"},
                                                        {"GET", "/v1/models"},
                                                        {"GET", "/v1/models/demo"},
                                                        {"GET", "/get_server_info"},
                                                        {"GET", "/health_generate"},
                                                        {"GET", "/openapi.json"},
                                                        {"GET", "/expert_load"},
                                                        {"GET", "/expert_load.svg"},
                                                        {"GET", "/"},
                                                        {"GET", "/chat"}};
  for (const auto& [method, path] : passed) {
    decode_.set_body(path, R"({"from":"a node"})");
    const HttpAnswer answer =
        method == "GET"s ? http_get(router_->port(), path) : http_post(router_->port(), path, "{}");
    EXPECT_EQ(answer.body, R"({"from":"a node"})") << method << " " << path;
    EXPECT_EQ(decode_.count(path), 1) << method << " " << path;
  }
  for (const char* own : {"/metrics", "/workers", "/ping", "/v1/health/"}) {
    EXPECT_EQ(http_get(router_->port(), own).status, 200) << own;
    EXPECT_EQ(decode_.count(own), 0) << own;
  }
  HttpAnswer answer = http_get(router_->port(), "/generate");
  EXPECT_EQ(answer.status, 405);
  EXPECT_EQ(answer.headers["allow"], "POST");
}

TEST_F(RouterWithFakeNodes, ResponsesAreNotStored) {
  start();
  ASSERT_TRUE(eventually([&] { return is_healthy(); }));
  for (const char* path : {"/v1/responses", "/responses"}) {
    decode_.set_body(path, R"({"from":"a node"})");
    const HttpAnswer answer =
        http_post(router_->port(), path, R"({"input":"a","store":true,"previous_response_id":null})");
    EXPECT_EQ(answer.body, R"({"from":"a node"})");
    const json sent = json::parse(decode_.body(path));
    EXPECT_EQ(sent.at("input"), "a");
    EXPECT_EQ(sent.at("store"), false);
    EXPECT_EQ(sent.at("bootstrap_port"), 8998);
  }
  const std::string reason = "a router has no stored responses: send the whole conversation as input";
  HttpAnswer answer =
      http_post(router_->port(), "/v1/responses", R"({"input":"a","previous_response_id":"resp_1"})");
  EXPECT_EQ(answer.status, 400);
  json error = json::parse(answer.body).at("error");
  EXPECT_EQ(error.at("param"), "previous_response_id");
  EXPECT_EQ(error.at("message"), "previous_response_id: " + reason);
  EXPECT_EQ(decode_.count("/v1/responses"), 1);
  for (const char* path : {"/v1/responses/resp_1", "/v1/responses/resp_1/input_items", "/responses/resp_1"}) {
    answer = http_get(router_->port(), path);
    EXPECT_EQ(answer.status, 404) << path;
    error = json::parse(answer.body).at("error");
    EXPECT_EQ(error.at("param"), "response_id");
    EXPECT_EQ(error.at("message"), reason);
  }
  EXPECT_EQ(http_post(router_->port(), "/v1/responses/resp_1/cancel", "").status, 404);
  EXPECT_EQ(http_get(router_->port(), "/v1/responses").status, 405);
}

TEST_F(RouterWithFakeNodes, OtherNamesOfItsRoutesArePassedOn) {
  start();
  ASSERT_TRUE(eventually([&] { return is_healthy(); }));
  for (const char* path : {"/models", "/models/org%2Fname", "/v1/version/", "/v1/server_info"}) {
    decode_.set_body(path, R"({"from":"a node"})");
    EXPECT_EQ(http_get(router_->port(), path).body, R"({"from":"a node"})") << path;
  }
  decode_.set_body("/chat/completions", "{}");
  EXPECT_EQ(http_post(router_->port(), "/chat/completions", "{}").status, 200);
}

TEST_F(RouterWithFakeNodes, LimitsThatCannotBeAreRefused) {
  RouterConfig config = limits();
  config.prefill = {{prefill_.url()}};
  config.decode = {decode_.url()};
  config.max_response_bytes = 0;
  EXPECT_NE(Router::make(config).status().message().find("max_response_bytes="), std::string::npos);
  config = limits();
  config.request_timeout_seconds = -1;
  EXPECT_NE(Router::make(config).status().message().find("request_timeout_seconds=-1"), std::string::npos);
}

// ---- shutdown -------------------------------------------------------------------------------------

TEST_F(RouterWithFakeNodes, StopsWhileNodesAreSilent) {
  RouterConfig config = limits();
  config.request_timeout_seconds = 0;
  start(config);
  ASSERT_TRUE(eventually([&] { return is_healthy(); }));
  decode_.set("/generate", [](FakePeer& peer) { peer.wait_until_closed(); });
  HttpClient client(router_->port());
  client.send(post_request("/generate", kRequest));
  ASSERT_TRUE(eventually([&] { return decode_.count("/generate") == 1; }));
  const auto begin = std::chrono::steady_clock::now();
  router_->stop();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  EXPECT_TRUE(client.at_end());
}

}  // namespace
}  // namespace fp4moe
