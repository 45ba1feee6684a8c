// The headers Date and X-Request-Id.
#include "server/api/openai_requests.h"
#include "server/server_fixture.h"

namespace fp4moe {
namespace {

using nlohmann::json;

constexpr char kOne[] = R"({"text":"a","sampling_params":{"max_new_tokens":1}})";

std::string with_id(const std::string& id) { return "X-Request-Id: " + id + "\r\n"; }

std::string id_of(const HttpAnswer& answer) {
  const auto at = answer.headers.find("x-request-id");
  return at == answer.headers.end() ? "" : at->second;
}

TEST(Date, IsInEveryResponse) {
  TestServer s;
  for (const char* path : {"/health", "/v1/models", "/nope", "/"}) {
    std::tm parsed = {};
    const std::string date = http_get(s.port, path).headers.at("date");
    ASSERT_NE(::strptime(date.c_str(), "%a, %d %b %Y %H:%M:%S GMT", &parsed), nullptr) << date;
    EXPECT_EQ(date.size(), 29u);
    EXPECT_NEAR(static_cast<double>(::timegm(&parsed)), static_cast<double>(std::time(nullptr)), 100);
  }
}

TEST(RequestId, IsReturnedOnGenerationRoutes) {
  TestServer s;
  const HttpAnswer chat_answer = http_post(s.port, kChat, chat("ab"));
  EXPECT_EQ(id_of(chat_answer), body_of(chat_answer)["id"]);
  const HttpAnswer stream = http_post(s.port, kChat, chat("ab", R"(,"stream":true)"));
  EXPECT_EQ(id_of(stream), parse_events(stream.body)[0]["id"]);
  EXPECT_EQ(id_of(http_post(s.port, "/generate", R"({"text":"a","rid":"mine"})")), "mine");
  EXPECT_EQ(id_of(http_post(s.port, kText, R"({"prompt":"a","n":2,"request_id":"both"})")), "both");
  EXPECT_EQ(id_of(http_get(s.port, "/v1/models", with_id("mine"))), "");
}

TEST(RequestId, OfTheClientIsTaken) {
  TestServer s;
  const HttpAnswer answer = http_post(s.port, kChat, chat("ab"), with_id("trace/7"));
  EXPECT_EQ(id_of(answer), "trace/7");
  EXPECT_EQ(body_of(answer)["id"], "trace/7");
  EXPECT_EQ(s.engine.last_request().id, "trace/7");
  const std::string longest(256, '~');
  EXPECT_EQ(id_of(http_post(s.port, "/generate", kOne, with_id(longest))), longest);
  EXPECT_EQ(id_of(http_post(s.port, "/generate", R"({"text":"a","rid":"mine"})", with_id("other"))), "mine");
  EXPECT_EQ(id_of(http_post(s.port, "/generate", R"({"text":"a","rid":null})", with_id("other"))), "other");
  EXPECT_EQ(
      body_of(http_post(s.port, "/generate", R"({"text":["a","b"]})", with_id("x")))[1]["meta_info"]["id"],
      "x-1");
}

TEST(RequestId, UnusableOnesAreIgnored) {
  TestServer s;
  for (const std::string& id : {std::string(), std::string("a b"), std::string("a\tb"),
                                std::string("\xC3\xA9"), std::string(257, 'a')}) {
    const HttpAnswer answer = http_post(s.port, "/generate", kOne, with_id(id));
    EXPECT_EQ(answer.status, 200) << id << answer.body;
    EXPECT_EQ(id_of(answer), body_of(answer)["meta_info"]["id"]);
    EXPECT_NE(id_of(answer), id);
  }
}

// A body's id may have characters that no header may have.
TEST(RequestId, NeverBreaksAHeader) {
  TestServer s;
  for (const char* id : {R"(a\r\nSet-Cookie: b)", "a b", "\xC3\xA9", R"(\u0000)"}) {
    const HttpAnswer answer =
        http_post(s.port, "/generate", std::string(R"({"text":"a","rid":")") + id + "\"}");
    EXPECT_EQ(answer.status, 200) << answer.body;
    EXPECT_EQ(answer.headers.count("x-request-id") + answer.headers.count("set-cookie"), 0u) << id;
  }
}

TEST(RequestId, IsReturnedWithErrors) {
  TestServer s;
  for (const auto& [body, status] :
       {std::pair{"{", 400}, std::pair{R"({"text":5})", 400}, std::pair{R"({"text":"WAITED"})", 503},
        std::pair{R"({"text":"a","model":"other"})", 404}}) {
    const HttpAnswer answer = http_post(s.port, "/generate", body, with_id("mine"));
    EXPECT_EQ(answer.status, status) << answer.body;
    EXPECT_EQ(id_of(answer), "mine") << body;
  }
  EXPECT_EQ(id_of(http_post(s.port, "/generate", R"({"text":5,"rid":"body"})")), "body");
  EXPECT_EQ(id_of(http_post(s.port, "/generate", R"({"text":5})")), "");
  s.server->drain(1);
  const HttpAnswer drained = http_post(s.port, "/generate", kOne, with_id("mine"));
  EXPECT_EQ(drained.status, 503);
  EXPECT_EQ(id_of(drained), "mine");
}

TEST(RequestId, IsNotLeftOverForTheNextRequest) {
  TestServer s;
  HttpClient client(s.port);
  client.send(post_request("/generate", kOne, with_id("mine")));
  EXPECT_EQ(id_of(client.receive()), "mine");
  client.send(get_request("/v1/models"));
  EXPECT_EQ(id_of(client.receive()), "");
}

TEST(RequestId, ADuplicateOfARunningRequestIsIgnored) {
  TestServer s(FakeOptions{std::chrono::milliseconds(1)});
  HttpClient first(s.port);
  first.send(post_request("/generate",
                          R"({"text":"a","sampling_params":{"max_new_tokens":100000,"ignore_eos":true}})",
                          with_id("x")));
  ASSERT_TRUE(eventually([&] { return s.engine.running() == 1; }));
  const HttpAnswer second = http_post(s.port, "/generate", kOne, with_id("x"));
  EXPECT_EQ(second.status, 200) << second.body;
  EXPECT_NE(id_of(second), "x");
  EXPECT_EQ(http_post(s.port, "/generate", R"({"text":"a","rid":"x"})").status, 400)
      << "an explicit id is refused";
  EXPECT_EQ(json::parse(http_post(s.port, "/abort_request", R"({"rid":"x"})").body)["num_aborted"], 1);
}

TEST(RequestId, SimultaneousDuplicatesAreServed) {
  TestServer s(FakeOptions{std::chrono::milliseconds(1)});
  std::atomic<int> served{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i)
        served += http_post(s.port, "/generate", kOne, with_id("same")).status == 200;
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(served.load(), 160);
}

TEST(RequestId, IsNotAnUnknownField) {
  ServerConfig config;
  config.strict_requests = true;
  TestServer s({}, config);
  EXPECT_EQ(http_post(s.port, kChat, chat("a"), with_id("mine")).status, 200);
  const char* message = R"({"messages":[{"role":"user","content":"ab"}],"max_tokens":2})";
  EXPECT_EQ(http_post(s.port, "/v1/messages", message, with_id("mine")).status, 200);
  EXPECT_EQ(http_post(s.port, "/v1/responses", R"({"input":"ab"})", with_id("mine")).status, 200);
}

}  // namespace
}  // namespace fp4moe
