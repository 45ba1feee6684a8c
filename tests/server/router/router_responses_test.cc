// A router whose nodes answer client requests with arbitrary bytes forwards valid responses and survives.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <thread>

#include "server/router/router_fixture.h"

namespace fp4moe {
namespace {

using nlohmann::json;
using std::string_literals::operator""s;

const std::string kStreamHead =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";

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
       "has more than 100000 bytes (--max-response-bytes)"},
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
       "its response has status 100; it must be 200 to 599"},
      {"status 999", bytes(http_answer("{}", 999)), 502,
       "its response has status 999; it must be 200 to 599"},
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

TEST_F(RouterWithFakeNodes, AHeadHasTheLengthOfTheBody) {
  start();
  ASSERT_TRUE(eventually([&] { return is_healthy(); }));
  decode_.set_body("/v1/models", R"({"a":1})");
  HttpClient client(router_->port());
  client.send("HEAD /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" + get_request("/health"));
  EXPECT_TRUE(client.receive_until("Content-Length: 7\r\n\r\nHTTP/1.1 200 OK\r\n"));
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
  for (int i = 0; i < 3; ++i) EXPECT_EQ(generate().status, 200) << "the budget was not released";
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

TEST_F(RouterWithFakeNodes, ErrorsOfMessagesHaveAnthropicsShape) {
  start();
  ASSERT_TRUE(eventually([&] { return is_healthy(); }));
  const std::string whole = "event: ping\ndata: {\"type\":\"ping\"}\n\n";
  decode_.set("/v1/messages", [&](FakePeer& peer) { peer.send(kStreamHead + chunk(whole)); });
  HttpAnswer answer = http_post(router_->port(), "/v1/messages", "{}");
  EXPECT_EQ(answer.body.rfind(whole + R"(event: error
data: {"type":"error","error":{"type":"overloaded_error","message":"decode node )",
                              0),
            0u)
      << answer.body;
  EXPECT_EQ(answer.body.find("[DONE]"), std::string::npos);
  for (const std::string path : {"/v1/messages", "/v1/messages/count_tokens"}) {
    EXPECT_EQ(json::parse(http_get(router_->port(), path).body).at("type"), "error");
    ASSERT_TRUE(eventually([&] { return is_healthy(); }));
    decode_.set(path, [](FakePeer&) {});
    answer = http_post(router_->port(), path, "{}");
    EXPECT_EQ(answer.status, 502);
    EXPECT_EQ(json::parse(answer.body).at("error").at("type"), "api_error");
  }
}

TEST_F(RouterWithFakeNodes, AStreamHasNoTotalLimitOfTimeOrBytes) {
  start();
  ASSERT_TRUE(eventually([&] { return is_healthy(); }));
  const std::string event = "data: " + std::string(20000, 'x') + "\n\n";
  constexpr int kEvents = 20;  // 400 KB in 1.2 s; both exceed the limits of a non-streamed response
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

// A response that breaks off concerns its own client, as long as the node is healthy.
TEST_F(RouterWithFakeNodes, ABrokenAnswerLeavesAHealthyNodeUp) {
  RouterConfig config = limits();
  config.health_check_seconds = 1000;
  start(config);
  ASSERT_TRUE(eventually([&] { return is_healthy(); }));
  decode_.set_body("/v1/completions", "{}");
  const std::string half = "data: {\"text\":\"a\"}\n\n";
  int num_checks = decode_.count("/health");
  for (const FakeNode::Script& script :
       {FakeNode::Script([&](FakePeer& peer) { peer.send(kStreamHead + chunk(half)); }),
        FakeNode::Script([](FakePeer& peer) { peer.reset(); }), bytes(""), bytes("no HTTP\r\n")}) {
    decode_.set("/generate", script);
    generate();
    EXPECT_TRUE(worker("decode").at("is_up").get<bool>());
    EXPECT_EQ(http_post(router_->port(), "/v1/completions", "{}").status, 200);
    EXPECT_TRUE(eventually([&] { return decode_.count("/health") > num_checks; }));
    num_checks = decode_.count("/health");
    EXPECT_TRUE(eventually([&] { return is_healthy(); }));
  }
  EXPECT_EQ(worker("decode").at("num_failed_requests"), 4);
  decode_.set_bytes("/health", http_answer("{}", 503));
  generate();
  EXPECT_TRUE(eventually([&] { return !worker("decode").at("is_up").get<bool>(); }));
  EXPECT_EQ(worker("decode").at("problem"), "/health returned status 503");
  const auto num_requests = worker("prefill").at("num_requests");
  generate();
  EXPECT_EQ(worker("prefill").at("num_requests"), num_requests) << "no node got the request";
}

TEST_F(RouterWithFakeNodes, WaitsWithoutLimitForItsRequests) {
  RouterConfig config = limits();
  config.request_timeout_seconds = 1e10;  // is 1e19 ns, which 64 bits cannot count
  EXPECT_NE(Router::make(config).status().message().find("request_timeout_seconds"), std::string::npos);
  start(limits());
  ASSERT_TRUE(eventually([&] { return is_healthy(); }));
  decode_.set("/generate", [](FakePeer& peer) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    peer.send(http_answer("{}"));
  });
  int status = 0;
  std::thread client([&] { status = generate().status; });
  EXPECT_TRUE(eventually([&] { return decode_.count("/generate") > 0; }));
  router_->drain(std::numeric_limits<double>::infinity());
  router_->stop();
  client.join();
  EXPECT_EQ(status, 200);
}

// Otherwise a node could fill the router's memory through a client that reads slowly.
TEST_F(RouterWithFakeNodes, AStreamThatNobodyReadsIsDropped) {
  RouterConfig config = limits();
  config.http.max_unsent_bytes = 256 << 10;  // not reached: the router reads no further
  config.http.write_timeout_seconds = 1;
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
  // Socket buffers of some MiB must fill first, which takes a while under a sanitizer.
  EXPECT_TRUE(eventually(is_dropped) || eventually(is_dropped) || eventually(is_dropped));
  EXPECT_LT(num_sent.load(), 32 << 20);
  EXPECT_NE(log().find("the client read nothing for write_timeout_seconds=1"), std::string::npos) << log();
}

TEST_F(RouterWithFakeNodes, AStreamThatIsReadSlowlySlowsTheNodeDown) {
  RouterConfig config = limits();
  config.http.max_unsent_bytes = 256 << 10;
  start(config);
  ASSERT_TRUE(eventually([&] { return is_healthy(); }));
  const std::string event = "data: " + std::string(100000, 'x') + "\n\n";
  constexpr size_t kEvents = 400;  // 40 MB, more than the socket buffers
  std::atomic<size_t> num_sent{0};
  decode_.set("/generate", [&](FakePeer& peer) {
    peer.send(kStreamHead);
    for (; num_sent < kEvents && peer.send(chunk(event)); ++num_sent) {
    }
    peer.send("0\r\n\r\n");
  });
  HttpClient client(router_->port());
  client.send(post_request("/generate", kRequest));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_LT(num_sent.load(), kEvents);
  const HttpAnswer answer = client.receive();
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(answer.body.size(), kEvents * event.size());
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

TEST_F(RouterWithFakeNodes, RequestIdsArePassedOn) {
  start();
  ASSERT_TRUE(eventually([&] { return is_healthy(); }));
  const auto id_for = [&](const std::string& id) {
    decode_.set_bytes(
        "/generate",
        http_answer("{}", 200, "Content-Type: application/json\r\nX-Request-Id: " + id + "\r\n"));
    const std::map<std::string, std::string> headers = generate().headers;
    const auto at = headers.find("x-request-id");
    return at == headers.end() ? "" : at->second;
  };
  EXPECT_EQ(id_for("chatcmpl-7"), "chatcmpl-7");
  EXPECT_EQ(id_for("a b"), "");
  EXPECT_EQ(id_for(std::string(300, 'a')), "");
}

}  // namespace
}  // namespace fp4moe
