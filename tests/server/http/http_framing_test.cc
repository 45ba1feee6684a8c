// Every request has one interpretation: the rules of RFC 9112 for bounds, hosts and targets; and origin
// checks.
#include <chrono>
#include <thread>

#include "server/http/origin.h"
#include "server/server_fixture.h"

namespace fp4moe {
namespace {

using std::string_literals::operator""s;

const std::string kSmuggled = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";

struct Case {
  const char* name;
  std::string lines;  // header lines after the request line
};

// Another parser could read each body as a separate request.
TEST(Framing, AmbiguousBoundsAreRefusedAndTheConnectionEnds) {
  TestServer s;
  const std::string chunked = "Transfer-Encoding: chunked\r\n";
  const Case cases[] = {
      {"unknown coding", "Transfer-Encoding: gzip\r\n"},
      {"no coding", "Transfer-Encoding: identity\r\n"},
      {"empty coding", "Transfer-Encoding:\r\n"},
      {"two codings", "Transfer-Encoding: gzip, chunked\r\n"},
      {"chunked twice", "Transfer-Encoding: chunked, chunked\r\n"},
      {"chunked and then another", "Transfer-Encoding: chunked, identity\r\n"},
      {"a parameter", "Transfer-Encoding: chunked;q=1\r\n"},
      {"quoted", "Transfer-Encoding: \"chunked\"\r\n"},
      {"a list with an empty element", "Transfer-Encoding: chunked,\r\n"},
      {"two lines", chunked + chunked},
      {"two lines, the first unknown", "Transfer-Encoding: x\r\n" + chunked},
      {"beside a length", chunked + "Content-Length: 3\r\n"},
      {"behind a length", "Content-Length: 3\r\n" + chunked},
      {"unknown beside a length", "Transfer-Encoding: xchunked\r\nContent-Length: 3\r\n"},
      {"equal lengths", "Content-Length: 3\r\nContent-Length: 3\r\n"},
      {"other lengths", "Content-Length: 3\r\nContent-Length: 4\r\n"},
      {"a list of lengths", "Content-Length: 3, 3\r\n"},
      {"a length with a sign", "Content-Length: +3\r\n"},
      {"a hexadecimal length", "Content-Length: 0x3\r\n"},
      {"a fraction", "Content-Length: 3.0\r\n"},
      {"no length", "Content-Length:\r\n"},
      {"2^64", "Content-Length: 18446744073709551616\r\n"},
      {"a folded line", "A: b\r\n c\r\n"},
      {"a folded coding", "Transfer-Encoding:\r\n chunked\r\n"},
      {"a folded first line", " A: b\r\n"},
      {"space before the colon", "Transfer-Encoding : chunked\r\n"},
      {"tab before the colon", "Content-Length\t: 3\r\n"},
      {"a bare LF", "A: b\nContent-Length: 3\r\n"},
      {"a bare CR", "A: b\rContent-Length: 3\r\n"},
      {"NUL", "A: \0b\r\n"s},
      {"no name", ": b\r\n"},
      {"no colon", "A\r\n"},
      {"two hosts", "Host: localhost\r\n"},
  };
  for (const Case& c : cases) {
    HttpClient client(s.port);
    client.send("POST /generate HTTP/1.1\r\nHost: localhost\r\n" + c.lines + "\r\n0\r\n\r\n" + kSmuggled);
    EXPECT_EQ(client.receive().status, 400) << c.name;
    EXPECT_TRUE(client.at_end()) << c.name;
  }
  for (const char* version : {"1.0", "1.1"}) {  // 1.0 has no chunks, 1.1 requires a host
    HttpClient client(s.port);
    client.send("POST /generate HTTP/"s + version + "\r\n" + (version == "1.0"s ? chunked : "") + "\r\n" +
                kSmuggled);
    EXPECT_EQ(client.receive().status, 400) << version;
    EXPECT_TRUE(client.at_end()) << version;
  }
  EXPECT_EQ(http_get(s.port, "/health").status, 200);
}

TEST(Framing, ChunksAreReadExactly) {
  TestServer s;
  const std::string head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: Chunked\r\n\r\n";
  const auto status = [&](const std::string& chunks) {
    HttpClient client(s.port);
    client.send(head + chunks);
    return client.receive().status;
  };
  EXPECT_EQ(status("C\r\n{\"text\":\"a\"}\r\n0\r\n\r\n"), 200);
  EXPECT_EQ(status("c;a=b;c=\"d\"\r\n{\"text\":\"a\"}\r\n00;e\r\nA: b\r\n\r\n"), 200);
  for (const char* chunks : {"c \r\n{", "0xc\r\n{\"text\":\"a\"}\r\n0\r\n\r\n",
                             "c\n{\"text\":\"a\"}\r\n0\r\n\r\n", "c\r\n{\"text\":\"a\"}0\r\n\r\n",
                             "c\r\n{\"text\":\"a\"}\n0\r\n\r\n", "\r\n", "g\r\n", "ffffffffffffffffff\r\n"})
    EXPECT_EQ(status(chunks), 400) << chunks;
  EXPECT_EQ(status("7fffffffffffffff\r\n"), 413);
  EXPECT_EQ(status("c;" + std::string(1 << 20, 'a')), 400) << "an endless chunk extension must be refused";
  EXPECT_EQ(status("c\r\n{\"text\":\"a\"}\r\n0\r\nA: " + std::string(1 << 20, 'a')), 400)
      << "an endless trailer must be refused";
}

TEST(Framing, ATrailerIsNoHeader) {
  ServerConfig config;
  config.api_keys = {"secret"};
  TestServer s({}, config);
  HttpClient client(s.port);
  client.send(
      "POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: "
      "chunked\r\n\r\nc\r\n{\"text\":\"a\"}\r\n0\r\n"
      "Authorization: Bearer secret\r\n\r\n");
  EXPECT_EQ(client.receive().status, 401);
}

int status_of(const TestServer& s, const std::string& target, const std::string& host = "localhost") {
  HttpClient client(s.port);
  client.send("GET " + target + " HTTP/1.1\r\nHost: " + host + "\r\n\r\n");
  return client.receive().status;
}

TEST(Target, MayBeAUrl) {
  TestServer s;
  for (const char* target : {"http://localhost/health", "HTTP://127.0.0.1:1/health?a", "https://[::1]/health",
                             "http://localhost", "http://localhost?a"})
    EXPECT_EQ(status_of(s, target), 200) << target;
  EXPECT_EQ(status_of(s, "http://localhost/health", "evil.example"), 200)
      << "the URL's host replaces the header";
  EXPECT_EQ(status_of(s, "http://evil.example/health"), 403);
  for (const char* target :
       {"http:///health", "http://user@localhost/health", "localhost:80", "ftp://localhost/", "health", "*"})
    EXPECT_NE(status_of(s, target), 200) << target;
}

TEST(Hosts, OfALoopbackListenerAreItsOwn) {
  TestServer s;
  for (const char* host : {"localhost", "LOCALHOST:30000", "127.0.0.1", "127.8.9.10:1", "[::1]", "[::1]:80"})
    EXPECT_EQ(status_of(s, "/health", host), 200) << host;
  for (const char* host : {"evil.example", "evil.example:30000", "localhost.evil.example",
                           "127.0.0.1.evil.example", "128.0.0.1", "[::2]", "2130706433"})
    EXPECT_EQ(status_of(s, "/health", host), 403) << host;
  for (const char* host : {"a@localhost", "localhost/x", "localhost, evil.example", "a b"})
    EXPECT_EQ(status_of(s, "/health", host), 400) << host;
}

TEST(Hosts, AreAddedByConfiguration) {
  ServerConfig config;
  config.allowed_hosts = {"chat.example.org"};
  {
    TestServer s({}, config);
    EXPECT_EQ(status_of(s, "/health", "Chat.example.org:8443"), 200);
    EXPECT_EQ(status_of(s, "/health", "localhost"), 200);
    EXPECT_EQ(status_of(s, "/health", "x.chat.example.org"), 403);
  }
  config.host = "0.0.0.0";
  EXPECT_EQ(status_of(TestServer({}, config), "/health", "evil.example"), 403)
      << "allowed hosts apply to any address";
  config.allowed_hosts.clear();
  EXPECT_EQ(status_of(TestServer({}, config), "/health", "any.example"), 200);
  config.host = "127.0.0.1";
  config.allowed_hosts = {"*"};
  EXPECT_EQ(status_of(TestServer({}, config), "/health", "any.example"), 200);
  for (const char* host : {"", "a b", "a:80", "http://a", "*.a"}) {
    config.allowed_hosts = {host};
    EXPECT_EQ(Server::make(config).status().code(), StatusCode::kInvalidArgument) << host;
  }
}

TEST(Hosts, AreNotCheckedOnUnixSockets) {
  HttpRequest request;
  request.host = "any.example";
  EXPECT_FALSE(refuse_foreign({}, /*is_loopback=*/false, request));
  request.origin = "https://other.example";
  EXPECT_EQ(refuse_foreign({}, /*is_loopback=*/false, request)->status, 403);
  request.origin = "https://any.example";
  EXPECT_FALSE(refuse_foreign({}, /*is_loopback=*/false, request))
      << "a page that a proxy serves under this host";
}

std::string from(const std::string& origin) { return "Origin: " + origin + "\r\n"; }

TEST(Origins, OfForeignPagesAreRefused) {
  TestServer s(FakeOptions{std::chrono::milliseconds(1)});
  HttpClient running(s.port);
  running.send(post_request(
      "/generate", R"({"text":"abc","sampling_params":{"max_new_tokens":1000000000,"ignore_eos":true}})"));
  ASSERT_TRUE(eventually([&] { return s.engine.running() == 1; }));
  // The origins that a form or fetch() with mode "no-cors" can send.
  for (const char* origin : {"https://evil.example", "http://localhost.evil.example", "null",
                             "http://localhost:1", "file://", "localhost"}) {
    EXPECT_EQ(http_post(s.port, "/abort_request", R"({"abort_all":true})", from(origin)).status, 403)
        << origin;
    EXPECT_EQ(http_post(s.port, "/v1/chat/completions", R"({"messages":[{"role":"user","content":"a"}]})",
                        from(origin))
                  .status,
              403)
        << origin;
    EXPECT_EQ(http_get(s.port, "/v1/models", from(origin)).status, 403) << origin;
  }
  EXPECT_EQ(s.engine.running(), 1);
  EXPECT_EQ(http_post(s.port, "/generate", R"({"text":"a"})", from("http://localhost")).status, 200)
      << "a page of this server";
}

TEST(Origins, AreAddedByConfiguration) {
  ServerConfig config;
  config.cors_allow_origins = {"https://a.example"};
  TestServer s({}, config);
  EXPECT_EQ(http_post(s.port, "/generate", R"({"text":"a"})", from("https://a.example")).status, 200);
  EXPECT_EQ(http_post(s.port, "/generate", R"({"text":"a"})", from("https://b.example")).status, 403);
  config.cors_allow_origins = {"*"};
  TestServer any({}, config);
  EXPECT_EQ(http_post(any.port, "/generate", R"({"text":"a"})", from("null")).status, 200);
}

TEST(Framing, EmptyLinesBeforeARequestAreIgnored) {
  TestServer s;
  const std::string text = "\r\n" + post_request("/generate", R"({"text":"a"})") + "\r\n\r\n" + kSmuggled;
  for (size_t cut : {size_t{1}, size_t{2}, size_t{3}, text.size() - kSmuggled.size() - 1, text.size() - 1}) {
    HttpClient client(s.port);
    client.send(text.substr(0, cut));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    client.send(text.substr(cut));
    EXPECT_EQ(client.receive().status, 200) << cut;
    EXPECT_EQ(client.receive().status, 200) << cut;
  }
  for (const char* wrong : {"\r", "\n", "\r\n\n", " \r\n"}) {
    HttpClient client(s.port);
    client.send(wrong + kSmuggled);
    EXPECT_EQ(client.receive().status, 400) << wrong;
  }
}

}  // namespace
}  // namespace fp4moe
