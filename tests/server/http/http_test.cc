// The HTTP layer with bad input and with slow and disconnecting clients.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <ctime>
#include <fstream>
#include <stdexcept>

#include "server/http/http.h"
#include "server/server_fixture.h"

namespace fp4moe {
namespace {

using nlohmann::json;
using std::string_literals::operator""s;

const std::string kEndless =
    R"({"text":"abc","stream":true,"sampling_params":{"max_new_tokens":1000000000,"ignore_eos":true}})";
const std::string kEndlessWhole =
    R"({"text":"abc","sampling_params":{"max_new_tokens":1000000000,"ignore_eos":true}})";

bool logged(TestServer& s, const std::string& part) {
  const std::vector<std::string> lines = s.log();
  return std::any_of(lines.begin(), lines.end(),
                     [&](const std::string& line) { return line.find(part) != std::string::npos; });
}

// Must hold after any abuse.
void expect_alive(const TestServer& s) { EXPECT_EQ(http_get(s.port, "/health").status, 200); }

TEST(MalformedJson, IsRefused) {
  TestServer s;
  const std::pair<const char*, std::string> cases[] = {
      {"empty", ""},
      {"truncated", R"({"text":"a)"},
      {"not an object", "[1,2]"},
      {"trailing bytes", R"({"text":"a"} x)"},
      {"NaN", R"({"text":"a","sampling_params":{"temperature":NaN}})"},
      {"number beyond double", R"({"text":"a","sampling_params":{"temperature":1e999}})"},
      {"lone surrogate", R"({"text":"\ud800"})"},
      {"invalid UTF-8", "{\"text\":\"\xFF\xFE\"}"},
      {"GBK bytes", "{\"text\":\"\xC4\xE3\"}"},
      {"deep array", std::string(100000, '[')},
      {"deep object",
       [] {
         std::string text;
         for (int i = 0; i < 100000; ++i) text += "{\"a\":";
         return text;
       }()},
      {"deep but closed", R"({"text":)" + std::string(70, '[') + std::string(70, ']') + "}"},
      {"many keys",
       [] {
         std::string text = "{";
         for (int i = 0; i < 5000; ++i) text += "\"k" + std::to_string(i) + "\":0,";
         return text + "\"text\":\"a\"}";
       }()},
  };
  for (const auto& [name, body] : cases) {
    const HttpAnswer answer = http_post(s.port, "/generate", body);
    EXPECT_EQ(answer.status, 400) << name;
    EXPECT_EQ(json::parse(answer.body)["error"]["type"], "invalid_request_error") << name;
  }
  expect_alive(s);
}

TEST(OddJson, IsAccepted) {
  TestServer s;
  const HttpAnswer twice = http_post(s.port, "/generate", R"({"text":"a","text":"b"})");
  EXPECT_EQ(json::parse(twice.body)["text"], "b");
  EXPECT_EQ(http_post(s.port, "/generate", "\xEF\xBB\xBF{\"text\":\"a\"}").status, 200);  // byte order mark
  EXPECT_EQ(http_post(s.port, "/generate", R"({"text":"<|im_end|>\u0000\ud83d\ude00"})").status, 200);
}

TEST(OddNumbers, AreReadExactlyOrRefused) {
  TestServer s;
  const auto status = [&](const std::string& field) {
    return http_post(s.port, "/generate", R"({"text":"a","sampling_params":{)" + field + "}}").status;
  };
  for (const char* field :
       {R"("temperature":-0)", R"("temperature":-0.0)", R"("max_new_tokens":-0)", R"("max_new_tokens":3.0)",
        R"("temperature":1e-400)", R"("seed":9223372036854775807)", R"("seed":-9223372036854775807)"})
    EXPECT_EQ(status(field), 200) << field;
  EXPECT_EQ(s.engine.last_request().sampling.seed, static_cast<uint64_t>(-9223372036854775807));
  for (const char* field :
       {R"("seed":9223372036854775808)", R"("seed":-9223372036854775809)", R"("seed":1e19)", R"("seed":0.5)",
        R"("max_new_tokens":18446744073709551616)", R"("max_new_tokens":-1e300)", R"("temperature":-1e-300)",
        R"("temperature":Infinity)", R"("temperature":0x1)", R"("temperature":+1)", R"("temperature":.5)"})
    EXPECT_EQ(status(field), 400) << field;
  expect_alive(s);
}

TEST(MalformedHttp, IsRefusedAndClosed) {
  TestServer s;
  const std::pair<const char*, std::string> cases[] = {
      {"no HTTP", "hello\r\n\r\n"},
      {"bad version", "GET / HTTP/9.9\r\n\r\n"},
      {"NUL in header", "GET /health HTTP/1.1\r\nHost: localhost\r\nA: \0\r\n\r\n"s},
      {"negative length", "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n"},
      {"two lengths",
       "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"},
      {"length and chunks",
       "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: "
       "chunked\r\n\r\n0\r\n\r\n"},
      {"bad chunk size",
       "POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"},
      {"negative chunk size",
       "POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n"},
      {"chunk size beyond 64 bits",
       "POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: "
       "chunked\r\n\r\n11111111111111111\r\na"},
      {"chunk without its end",
       "POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: "
       "chunked\r\n\r\n1\r\nabcd\r\n0\r\n\r\n"},
      {"NUL in the path", "GET /health\0 HTTP/1.1\r\nHost: localhost\r\n\r\n"s},
      {"no path", "GET HTTP/1.1\r\nHost: localhost\r\n\r\n"},
      {"TLS hello", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"s},
  };
  for (const auto& [name, bytes] : cases) {
    HttpClient client(s.port);
    client.send(bytes);
    EXPECT_EQ(client.receive().status, 400) << name;
    EXPECT_TRUE(client.at_end()) << name;
  }
  expect_alive(s);
}

TEST(Limits, Header) {
  TestServer s;
  HttpClient one(s.port);
  one.send("GET /health HTTP/1.1\r\nHost: localhost\r\nA: " + std::string(1 << 20, 'x') + "\r\n\r\n");
  EXPECT_EQ(one.receive().status, 431);
  std::string many;
  for (int i = 0; i < 10000; ++i) many += "A" + std::to_string(i) + ": 1\r\n";
  EXPECT_EQ(http_get(s.port, "/health", many).status, 431);
  expect_alive(s);
}

TEST(Limits, BodyWithAndWithoutLength) {
  ServerConfig config;
  config.max_body_bytes = 1000;
  TestServer s({}, config);
  EXPECT_EQ(http_post(s.port, "/generate", std::string(1001, ' ')).status, 413);
  HttpClient announced(s.port);
  announced.send("POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000000\r\n\r\n");
  EXPECT_EQ(announced.receive().status, 413);
  HttpClient chunked(s.port);
  chunked.send("POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n" +
               std::string(1001, ' '));
  EXPECT_EQ(chunked.receive().status, 413);
  const std::string fits = R"({"text":"a"})" + std::string(1000 - 12, ' ');
  EXPECT_EQ(http_post(s.port, "/generate", fits).status, 200);
}

TEST(Limits, Connections) {
  ServerConfig config;
  config.max_connections = 2;
  TestServer s({}, config);
  HttpClient a(s.port), b(s.port);
  for (HttpClient* client : {&a, &b}) {
    client->send(get_request("/health"));
    EXPECT_EQ(client->receive().status, 200);
  }
  HttpClient c(s.port);
  EXPECT_EQ(c.receive().status, 503);
}

TEST(Requests, ChunkedBodyInSmallPieces) {
  TestServer s;
  HttpClient client(s.port);
  const std::string bytes =
      "POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: "
      "chunked\r\n\r\n5\r\n{\"tex\r\n7\r\nt\":\"a\"}\r\n0\r\n\r\n";
  for (const char byte : bytes) client.send(std::string(1, byte));
  const HttpAnswer answer = client.receive();
  ASSERT_EQ(answer.status, 200) << answer.body;
  EXPECT_EQ(json::parse(answer.body)["text"], "a");
}

TEST(Requests, ExpectContinue) {
  TestServer s;
  HttpClient client(s.port);
  client.send(
      "POST /generate HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 12\r\n\r\n");
  EXPECT_EQ(client.receive().status, 100);
  client.send(R"({"text":"a"})");
  EXPECT_EQ(client.receive().status, 200);
}

TEST(Requests, PipelinedAreAnsweredInOrder) {
  TestServer s;
  HttpClient client(s.port);
  std::string bytes;
  for (int i = 0; i < 50; ++i) {
    bytes += post_request("/generate", R"({"text":")" + std::to_string(i) + "\"}");
    bytes += get_request("/health");
  }
  client.send(bytes);
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(json::parse(client.receive().body)["text"], std::to_string(i));
    EXPECT_EQ(json::parse(client.receive().body)["status"], "ok");
  }
}

TEST(Requests, OneThatArrivesWhileAPipelinedOneIsAnsweredStaysWhole) {
  TestServer s(FakeOptions{std::chrono::milliseconds(1)});
  HttpClient client(s.port);
  client.send(post_request("/generate", R"({"text":"first"})") +
              post_request("/generate", R"({"text":"second"})"));
  EXPECT_EQ(json::parse(client.receive().body)["text"], "first");
  client.send(post_request("/generate", R"({"text":"third"})"));
  EXPECT_EQ(json::parse(client.receive().body)["text"], "second");
  EXPECT_EQ(json::parse(client.receive().body)["text"], "third");
}

TEST(Requests, HeadHasNoBody) {
  TestServer s;
  HttpClient client(s.port);
  client.send("HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + get_request("/health"));
  ASSERT_TRUE(client.receive_until("\r\n\r\nHTTP/1.1 200 OK\r\n"));
}

TEST(Requests, KeepAliveAfterErrorsAndStreams) {
  TestServer s;
  HttpClient client(s.port);
  client.send(post_request("/generate", "{"));
  EXPECT_EQ(client.receive().status, 400);
  client.send(post_request("/generate", R"({"text":"a","stream":true})"));
  EXPECT_EQ(client.receive().status, 200);
  client.send(get_request("/health", "Connection: close\r\n"));
  EXPECT_EQ(client.receive().status, 200);
  EXPECT_TRUE(client.at_end());
}

TEST(Requests, Http10StreamEndsByClosing) {
  TestServer s;
  HttpClient client(s.port);
  client.send("POST /generate HTTP/1.0\r\nContent-Length: 26\r\n\r\n{\"text\":\"a\",\"stream\":true}");
  const HttpAnswer answer = client.receive();
  EXPECT_EQ(answer.headers.count("transfer-encoding"), 0u);
  EXPECT_EQ(parse_events(answer.body).back(), "[DONE]");
}

class Disconnect : public testing::TestWithParam<std::string> {};

TEST_P(Disconnect, AbortsTheRequest) {
  TestServer s(FakeOptions{std::chrono::milliseconds(1)});
  for (const bool rst : {false, true}) {
    const int64_t before = s.engine.aborted();
    auto client = std::make_unique<HttpClient>(s.port);
    client->send(post_request("/generate", GetParam()));
    ASSERT_TRUE(eventually([&] { return s.engine.running() == 1; }));
    if (rst) client->reset();
    client.reset();
    EXPECT_TRUE(eventually([&] { return s.engine.aborted() == before + 1 && s.engine.running() == 0; }));
  }
  expect_alive(s);
}
INSTANTIATE_TEST_SUITE_P(StreamOrNot, Disconnect, testing::Values(kEndless, kEndlessWhole),
                         [](const auto& test) { return test.param == kEndless ? "Stream" : "Whole"; });

// A shut-down sending side is the only sign that a client has disconnected.
TEST(Clients, OneThatShutsItsSideIsTakenForGone) {
  TestServer s(FakeOptions{std::chrono::milliseconds(1)});
  HttpClient client(s.port);
  client.send(post_request("/generate", kEndless));
  ASSERT_TRUE(eventually([&] { return s.engine.running() == 1; }));
  client.shut_sending();
  EXPECT_TRUE(eventually([&] { return s.engine.aborted() == 1; }));
  HttpClient early(s.port);
  early.send("GET /health HTTP/1.1\r\nHost: localhost\r\n");
  early.shut_sending();
  EXPECT_TRUE(early.at_end());
  expect_alive(s);
}

TEST(Clients, OnesThatComeAndGoLeaveNothing) {
  constexpr int kClients = 100000;
  TestServer s(FakeOptions{std::chrono::milliseconds(1)});
  const auto resident_pages = [] {
    int64_t all = 0, resident = 0;
    std::ifstream("/proc/self/statm") >> all >> resident;
    return resident;
  };
  [[maybe_unused]] int64_t before = 0;
  for (int i = 0; i < kClients; ++i) {
    HttpClient client(s.port);
    client.send(post_request("/generate", kEndless));
    client.reset();
    if (i == kClients / 10) before = resident_pages();
  }
  EXPECT_TRUE(eventually([&] { return s.engine.running() == 0; }));
#ifndef __SANITIZE_ADDRESS__  // AddressSanitizer delays freeing memory
  EXPECT_LT((resident_pages() - before) * sysconf(_SC_PAGESIZE), 16 << 20);
#endif
  expect_alive(s);
}

TEST(Clients, VanishingInTheMiddleOfARequest) {
  TestServer s;
  const std::string whole = post_request("/generate", R"({"text":"abc"})");
  for (size_t cut = 0; cut < whole.size(); ++cut) {
    HttpClient client(s.port);
    client.send(whole.substr(0, cut));
    if (cut % 2 == 0) client.reset();
  }
  expect_alive(s);
}

TEST(Clients, OneThatNeverReadsIsDropped) {
  ServerConfig config;
  config.max_unsent_bytes = 64 << 10;
  TestServer s({}, config);
  HttpClient client(s.port);
  client.send(post_request("/v1/completions",
                           R"({"prompt":"abc","stream":true,"max_tokens":1000000000,"ignore_eos":true})"));
  EXPECT_TRUE(eventually([&] { return s.engine.aborted() == 1; }));
  EXPECT_TRUE(eventually([&] { return logged(s, "dropped a client of /v1/completions: "); }));
  expect_alive(s);
}

TEST(Clients, OneWhoseAnswerOutrunsTheServerIsDropped) {
  ServerConfig config;
  config.max_unsent_bytes = 1;  // less than any delta
  TestServer s({}, config);
  HttpClient client(s.port);
  client.send(post_request("/generate", kEndlessWhole));
  EXPECT_TRUE(client.at_end());
  EXPECT_TRUE(eventually([&] { return s.engine.aborted() == 1 && s.engine.running() == 0; }));
  EXPECT_TRUE(logged(s, "unprocessed deltas exceed max_unsent_bytes=1"));
  expect_alive(s);
}

TEST(Handler, WhatItThrowsIsLoggedAndAnswered) {
  std::string logged;  // written on the connection's thread before the response
  ServerConfig config{.port = 0};
  config.log_sink = [&](LogLevel, const std::string& line) { logged += line; };
  auto server = HttpServer::make(
      config, [](const std::shared_ptr<HttpExchange>&) { throw std::runtime_error("no memory left"); });
  ASSERT_TRUE(server.ok()) << server.status().to_string();
  for (int i = 0; i < 2; ++i) {
    const HttpAnswer answer = http_get((*server)->port(), "/x");
    EXPECT_EQ(answer.status, 500);
    EXPECT_NE(answer.body.find("no memory left"), std::string::npos) << answer.body;
  }
  EXPECT_NE(logged.find("request failed: /x: no memory left"), std::string::npos) << logged;
}

TEST(Clients, OneThatPipelinesAndNeverReadsGetsNoMoreAnswersMade) {
  constexpr int kRequests = 2000;
  constexpr size_t kAnswerBytes = 256 << 10;  // 500 MB for all requests; socket buffers hold far less
  ServerConfig config;
  config.port = 0;
  config.write_timeout_seconds = 0.3;
  std::atomic<int> answered{0};
  auto server = HttpServer::make(config, [&](std::shared_ptr<HttpExchange> exchange) {
    ++answered;
    HttpResponse response;
    response.body.assign(kAnswerBytes, 'x');
    exchange->respond(std::move(response));
  });
  ASSERT_TRUE(server.ok());
  HttpClient client((*server)->port());
  std::string bytes;
  for (int i = 0; i < kRequests; ++i) bytes += get_request("/");
  client.send(bytes);
  ASSERT_TRUE(eventually([&] { return answered > 0 && (*server)->busy_exchanges() == 0; }));
  EXPECT_LT(answered, kRequests / 4);
}

// Exhausts and releases this process's descriptors, which the server shares.
TEST(Clients, OneWithoutADescriptorLeftIsToldSo) {
  TestServer s;
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit before = limit;
  limit.rlim_cur = 256;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  std::vector<int> files;
  for (int file = open("/dev/null", O_RDONLY); file >= 0; file = open("/dev/null", O_RDONLY))
    files.push_back(file);
  ASSERT_FALSE(files.empty());
  close(files.back());
  files.pop_back();
  {
    HttpClient client(s.port);  // takes the last descriptor
    const HttpAnswer answer = client.receive();
    EXPECT_EQ(answer.status, 503);
    EXPECT_EQ(answer.headers.at("retry-after"), "1");
    EXPECT_NE(
        json::parse(answer.body)["error"]["message"].get<std::string>().find("no file descriptors left"),
        std::string::npos);
    EXPECT_TRUE(client.at_end());
    EXPECT_TRUE(logged(s, "connections are refused with 503: "));
    const std::clock_t start = std::clock();
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    EXPECT_LT(std::clock() - start, CLOCKS_PER_SEC / 4) << "the server spins";
    for (const int file : files) close(file);
  }
  setrlimit(RLIMIT_NOFILE, &before);
  expect_alive(s);
}

TEST(Clients, OneThatStallsIsDroppedByTime) {
  ServerConfig config;
  config.max_unsent_bytes = int64_t{1} << 40;
  config.write_timeout_seconds = 0.2;
  TestServer s(FakeOptions{std::chrono::microseconds(1)}, config);
  HttpClient client(s.port);
  const std::string prompt(4000, 'x');  // events of a few KiB, which fill the socket buffers
  client.send(
      post_request("/generate", R"({"stream":true,"text":")" + prompt +
                                    R"(","sampling_params":{"ignore_eos":true,"max_new_tokens":100000}})"));
  EXPECT_TRUE(eventually([&] { return s.engine.aborted() == 1; }));
}

TEST(Clients, SlowHeaderAndIdleConnectionAreClosed) {
  ServerConfig config;
  config.request_timeout_seconds = 0.1;
  config.idle_timeout_seconds = 0.3;
  TestServer s({}, config);
  HttpClient slow(s.port), idle(s.port), body(s.port);
  slow.send("GET /hea");
  body.send("POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{");
  EXPECT_TRUE(slow.at_end());
  EXPECT_TRUE(body.at_end());
  EXPECT_TRUE(idle.at_end());
}

TEST(Clients, ManyAtOnceGetTheirOwnAnswers) {
  TestServer s;
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int t = 0; t < 16; ++t) {
    threads.emplace_back([&, t] {
      HttpClient client(s.port);
      for (int i = 0; i < 20; ++i) {
        const std::string text = std::to_string(t) + "/" + std::to_string(i);
        const bool stream = i % 2 == 0;
        client.send(post_request("/generate",
                                 R"({"text":")" + text + R"(","stream":)" + (stream ? "true}" : "false}")));
        const HttpAnswer answer = client.receive();
        const std::string got =
            stream ? parse_events(answer.body).rbegin()[1]["text"] : json::parse(answer.body)["text"];
        right += got == text;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right.load(), 320);
}

TEST(Stop, WithOpenConnectionsAndRunningRequests) {
  auto s = std::make_unique<TestServer>(FakeOptions{std::chrono::milliseconds(1)});
  HttpClient idle(s->port), stream(s->port), whole(s->port), partial(s->port);
  stream.send(post_request("/generate", kEndless));
  whole.send(post_request("/generate", kEndlessWhole));
  partial.send("POST /gen");
  ASSERT_TRUE(stream.receive_until("data: "));
  ASSERT_TRUE(eventually([&] { return s->engine.running() == 2; }));
  s->server->stop();
  EXPECT_TRUE(eventually([&] { return s->engine.running() == 0; }));
  s.reset();
  EXPECT_TRUE(idle.at_end());
  EXPECT_EQ(whole.receive().status, 0);
}

}  // namespace
}  // namespace fp4moe
