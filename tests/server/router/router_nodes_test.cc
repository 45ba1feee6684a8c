// A router in front of nodes with arbitrary responses: it reports why a node is down, and survives.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "fp4moe/router.h"
#include "server/fake_node.h"
#include "server/http_client.h"
#include "support/eventually.h"

namespace fp4moe {
namespace {

using nlohmann::json;
using std::string_literals::operator""s;

const std::string kRequest = R"({"text":"a","sampling_params":{"max_new_tokens":4}})";
const std::string kStreamHead =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";

std::string chunk(const std::string& bytes) {
  char size[32];
  std::snprintf(size, sizeof size, "%zx\r\n", bytes.size());
  return size + bytes + "\r\n";
}

// A prefill node, a decode node and the router in front of them.
class RouterWithFakeNodes : public testing::Test {
 protected:
  static RouterConfig limits() {
    RouterConfig config;
    config.health_check_seconds = 0.02;
    config.health_timeout_seconds = 0.4;
    config.request_timeout_seconds = 1;
    config.quiet_timeout_seconds = 0.5;
    config.max_answer_bytes = 100000;
    config.max_held_bytes = 150000;
    return config;
  }

  void start(RouterConfig config = limits()) {
    config.http.port = 0;
    config.http.log_sink = [this](LogLevel, const std::string& line) {
      const std::lock_guard lock(mutex_);
      log_.push_back(line);
    };
    config.prefill = {{prefill_.url()}};
    config.decode = {decode_.url()};
    auto router = Router::make(config);
    ASSERT_TRUE(router.ok()) << router.status().to_string();
    router_ = std::move(router).value();
  }
  bool is_healthy() const { return http_get(router_->port(), "/health").status == 200; }
  json worker(const std::string& role) const {
    const json answer = json::parse(http_get(router_->port(), "/workers").body);
    for (const json& node : answer.at("workers"))
      if (node.at("role") == role) return node;
    return {};
  }
  HttpAnswer generate() const { return http_post(router_->port(), "/generate", kRequest); }
  std::string log() const {
    const std::lock_guard lock(mutex_);
    std::string text;
    for (const std::string& line : log_) text += line + "\n";
    return text;
  }

  mutable std::mutex mutex_;
  std::vector<std::string> log_;
  FakeNode prefill_{"prefill"}, decode_{"decode"};
  std::unique_ptr<Router> router_;
};

// ---- /server_info ---------------------------------------------------------------------------------

struct BadAnswer {
  const char* name;
  FakeNode::Script script;
  const char* reason;  // part of it
};

FakeNode::Script bytes(const std::string& text) {
  return [text](FakePeer& peer) { peer.send(text); };
}
FakeNode::Script body(const std::string& text) { return bytes(http_answer(text)); }

std::string info_with(const std::string& fields) { return "{" + fields + "}"; }

// Bad responses to /server_info.
std::vector<BadAnswer> bad_infos() {
  const std::string mode = R"("disaggregation_mode":"prefill",)";
  const char* const not_an_object = "its /server_info is not a JSON object";
  const char* const not_http = "its response is not HTTP/1.1";
  const char* const cut = "the connection was closed before the end of the response";
  const char* const late = "its response is incomplete after 0.4 s";
  const char* const long_head = "a header of its response has more than 16384 bytes";
  std::vector<BadAnswer> cases = {
      {"mode null", body(info_with(R"("disaggregation_mode":null)")),
       "--disaggregation-mode null but is configured as --prefill"},
      {"mode number", body(info_with(R"("disaggregation_mode":7)")),
       R"(has disaggregation_mode 7; legal: "null", "prefill", "decode")"},
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
       R"(has disaggregation_bootstrap_port "8998"; legal: an integer in 0..65535)"},
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
      {"status 100", bytes("HTTP/1.1 100 Continue\r\n\r\n"),
       "its response has status 100; legal: 200 to 599"},
      {"status 999", bytes(http_answer("{}", 999)), "its response has status 999; legal: 200 to 599"},
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
  return cases;
}

TEST_F(RouterWithFakeNodes, ANodeWhoseAnswerIsMalformedIsDownAndSaysWhy) {
  start();
  ASSERT_TRUE(eventually([&] { return is_healthy(); }));
  for (const BadAnswer& bad : bad_infos()) {
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
  for (const BadAnswer& bad : bad_infos()) {
    if (std::string(bad.reason).find("/server_info") != std::string::npos ||
        std::string(bad.reason).find("JSON") != std::string::npos ||
        std::string(bad.reason).find("bootstrap_port") != std::string::npos ||
        std::string(bad.reason).find("mode") != std::string::npos ||
        bad.reason == std::string("xxx... but is configured"))
      continue;  // any body of a 200 counts as healthy
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

// ---- responses to clients -------------------------------------------------------------------------

struct BadGeneration {
  const char* name;
  FakeNode::Script script;
  int status;
  const char* reason;
};

std::vector<BadGeneration> bad_generations() {
  const std::string length = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: ";
  return {
      {"over the limit", bytes(http_answer(std::string(100001, 'x'))), 502,
       "has more than 100000 bytes (--max-answer-bytes)"},
      {"endless",
       [length](FakePeer& peer) {
         peer.send(length + "1000000000000\r\n\r\n") && peer.send_forever(std::string(65536, 'x'));
       },
       502, "has more than 100000 bytes"},
      {"endless, no length",
       [](FakePeer& peer) {
         peer.send("HTTP/1.1 200 OK\r\n\r\n") && peer.send_forever(std::string(65536, 'x'));
       },
       502, "has more than 100000 bytes"},
      {"a long header", bytes("HTTP/1.1 200 OK\r\nX: " + std::string(100000, 'y')), 502,
       "a header of its response has more than 16384 bytes"},
      {"a banner", bytes("SSH-2.0-OpenSSH_9.2\x1b[31m\r\n"), 502, "its response is not HTTP/1.1"},
      {"status 100", bytes("HTTP/1.1 100 Continue\r\n\r\n"), 502,
       "its response has status 100; legal: 200 to 599"},
      {"status 999", bytes(http_answer("{}", 999)), 502, "its response has status 999; legal: 200 to 599"},
      {"closed at once", bytes(""), 502, "the connection was closed before the end of the response"},
      {"half a body", bytes(length + "100\r\n\r\n{"), 502,
       "the connection was closed before the end of the response"},
      {"reset at once", [](FakePeer& peer) { peer.reset(); }, 502, "reset"},
      {"nothing", [](FakePeer& peer) { peer.wait_until_closed(); }, 504,
       "its response is incomplete after 1 s"},
      {"a dripping head",
       [](FakePeer& peer) {
         peer.drip("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Padding: 0123456789\r\n"s);
       },
       504, "its response is incomplete after 1 s"},
      {"a dripping body",
       [length](FakePeer& peer) { peer.send(length + "1000\r\n\r\n") && peer.drip(std::string(1000, ' ')); },
       504, "its response is incomplete after 1 s"},
      {"quiet in the middle",
       [length](FakePeer& peer) {
         peer.send(length + "1000\r\n\r\n{");
         peer.wait_until_closed();
       },
       504, "sent nothing for 0.5 s"},
  };
}

TEST_F(RouterWithFakeNodes, AnAnswerThatCannotBePassedOnIsAnErrorWithItsReason) {
  start();
  for (const BadGeneration& bad : bad_generations()) {
    SCOPED_TRACE(bad.name);
    ASSERT_TRUE(eventually([&] { return is_healthy(); }));
    decode_.set("/generate", bad.script);
    const HttpAnswer answer = generate();
    EXPECT_EQ(answer.status, bad.status);
    const std::string message = json::parse(answer.body).at("error").at("message").get<std::string>();
    EXPECT_NE(message.find("decode node " + decode_.url() + ": "), std::string::npos) << message;
    EXPECT_NE(message.find(bad.reason), std::string::npos) << message;
    EXPECT_TRUE(eventually([&] { return worker("decode").at("num_running_reqs") == 0; }));
    EXPECT_TRUE(eventually([&] { return worker("prefill").at("num_running_reqs") == 0; }));
  }
  decode_.set_body("/generate", R"({"text":"b"})");
  ASSERT_TRUE(eventually([&] { return is_healthy(); }));
  EXPECT_EQ(generate().body, R"({"text":"b"})");
}

TEST_F(RouterWithFakeNodes, AllUnfinishedAnswersHaveOneBudget) {
  start();
  ASSERT_TRUE(eventually([&] { return is_healthy(); }));
  decode_.set("/generate", [](FakePeer& peer) {
    peer.send("HTTP/1.1 200 OK\r\nContent-Length: 90001\r\n\r\n" + std::string(90000, 'x'));
    peer.wait_until_closed();
  });
  std::vector<HttpAnswer> answers(3);
  std::vector<std::thread> clients;
  for (HttpAnswer& answer : answers) clients.emplace_back([&] { answer = generate(); });
  for (std::thread& client : clients) client.join();
  const auto over = std::count_if(answers.begin(), answers.end(), [](const HttpAnswer& a) {
    return a.status == 503 &&
           a.body.find("holds more than 150000 bytes of unfinished responses") != std::string::npos;
  });
  EXPECT_GE(over, 1);
  for (const HttpAnswer& answer : answers)
    EXPECT_TRUE(answer.status == 503 || answer.status == 504) << answer.status;
  decode_.set_body("/generate", std::string(99999, 'y'));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(generate().status, 200) << "the budget is free again";
}

TEST_F(RouterWithFakeNodes, AStreamThatBreaksEndsWithWholeEventsAndAnErrorEvent) {
  start();
  const std::string whole = "data: {\"text\":\"a\"}\n\n", half = "data: {\"te";
  const std::pair<FakeNode::Script, const char*> ends[] = {
      {[&](FakePeer& peer) { peer.send(kStreamHead + chunk(whole) + chunk(half)); }, "closed before the end"},
      {[&](FakePeer& peer) {
         peer.send(kStreamHead + chunk(whole + half));
         peer.send("zz\r\n");
       },
       "is not HTTP/1.1"},
      {[&](FakePeer& peer) {
         peer.send(kStreamHead + chunk(whole + half));
         peer.wait_until_closed();
       },
       "sent nothing for 0.5 s"}};
  for (const auto& [script, reason] : ends) {
    ASSERT_TRUE(eventually([&] { return is_healthy(); }));
    decode_.set("/generate", script);
    const HttpAnswer answer = generate();
    EXPECT_EQ(answer.status, 200);
    EXPECT_EQ(answer.body.rfind(whole + "data: {\"error\":", 0), 0u) << answer.body;
    EXPECT_NE(answer.body.find(reason), std::string::npos) << answer.body;
    EXPECT_EQ(answer.body.find(half + "data"), std::string::npos) << answer.body;
    EXPECT_EQ(answer.body.substr(answer.body.size() - 14), "data: [DONE]\n\n");
  }
}

TEST_F(RouterWithFakeNodes, AStreamHasNoTotalLimitOfTimeOrBytes) {
  start();
  ASSERT_TRUE(eventually([&] { return is_healthy(); }));
  const std::string event = "data: " + std::string(20000, 'x') + "\n\n";
  constexpr int kEvents = 20;  // 400 KB in 1.2 s: both exceed the limits of a non-streamed response
  decode_.set("/generate", [&](FakePeer& peer) {
    peer.send(kStreamHead);
    for (int i = 0; i < kEvents; ++i) {
      peer.send(chunk(event));
      std::this_thread::sleep_for(std::chrono::milliseconds(60));
    }
    peer.send("0\r\n\r\n");
  });
  const HttpAnswer answer = generate();
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(answer.body.size(), kEvents * event.size());
}

// Otherwise a node could fill the router's memory through a client that reads slowly.
TEST_F(RouterWithFakeNodes, AStreamThatNobodyReadsIsDropped) {
  RouterConfig config = limits();
  config.http.max_unsent_bytes = 256 << 10;
  start(config);
  ASSERT_TRUE(eventually([&] { return is_healthy(); }));
  std::atomic<int64_t> num_sent{0};
  decode_.set("/generate", [&](FakePeer& peer) {
    const std::string event = chunk("data: " + std::string(60000, 'x') + "\n\n");
    peer.send(kStreamHead);
    while (peer.send(event)) num_sent += std::ssize(event);
  });
  HttpClient client(router_->port());
  client.send(post_request("/generate", kRequest));
  const auto is_dropped = [&] {
    return worker("decode").at("num_requests") == 1 && worker("decode").at("num_running_reqs") == 0;
  };
  // Socket buffers of some MiB are filled first, which takes a while with a sanitizer.
  EXPECT_TRUE(eventually(is_dropped) || eventually(is_dropped) || eventually(is_dropped));
  EXPECT_LT(num_sent.load(), 32 << 20);
  EXPECT_NE(log().find("the client is behind by more than max_unsent_bytes=262144"), std::string::npos)
      << log();
}

TEST_F(RouterWithFakeNodes, HeadersOfAnswersArePassedOnOnlyWhereTheyArePlain) {
  start();
  ASSERT_TRUE(eventually([&] { return is_healthy(); }));
  decode_.set_bytes(
      "/generate",
      http_answer("{}", 503, "Content-Type: text/x\r\nRetry-After: 7\r\nAllow: GET\r\nSet-Cookie: a=b\r\n"));
  HttpAnswer answer = generate();
  EXPECT_EQ(answer.status, 503);
  EXPECT_EQ(answer.headers["content-type"], "text/x");
  EXPECT_EQ(answer.headers["retry-after"], "7");
  EXPECT_EQ(answer.headers["allow"], "GET");
  EXPECT_EQ(answer.headers.count("set-cookie"), 0u);
  decode_.set_bytes(
      "/generate",
      http_answer("{}", 200, "Content-Type: a\x80z\r\nRetry-After: " + std::string(300, '1') + "\r\n"));
  answer = generate();
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(answer.headers["content-type"], "application/octet-stream");
  EXPECT_EQ(answer.headers.count("retry-after"), 0u);
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
  for (const char* own : {"/metrics", "/workers"}) {
    EXPECT_EQ(http_get(router_->port(), own).status, 200) << own;
    EXPECT_EQ(decode_.count(own), 0) << own;
  }
  HttpAnswer answer = http_get(router_->port(), "/generate");
  EXPECT_EQ(answer.status, 405);
  EXPECT_EQ(answer.headers["allow"], "POST");
}

TEST_F(RouterWithFakeNodes, LimitsThatCannotBeAreRefused) {
  RouterConfig config = limits();
  config.prefill = {{prefill_.url()}};
  config.decode = {decode_.url()};
  config.max_answer_bytes = 0;
  EXPECT_NE(Router::make(config).status().message().find("max_answer_bytes="), std::string::npos);
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
