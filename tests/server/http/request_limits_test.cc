// The cost of one request before it is refused (bytes, memory, copies and time), and its effect on other
// requests.
#include <time.h>
#include <unistd.h>

#include <fstream>
#include <future>
#include <thread>

#include "server/api/apis.h"
#include "server/api/chat_messages.h"
#include "server/http/http.h"
#include "server/http/request_memory.h"
#include "server/http/worker_pool.h"
#include "server/server_fixture.h"

namespace fp4moe {
namespace {

using nlohmann::json;

std::string head(const std::string& path, int64_t length, const std::string& lines = "") {
  return "POST " + path + " HTTP/1.1\r\nHost: localhost\r\n" + lines +
         "Content-Length: " + std::to_string(length) + "\r\n\r\n";
}

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

int64_t virtual_bytes() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

// ---- before the body ------------------------------------------------------------------------------

TEST(Head, IsAnsweredBeforeTheBody) {
  ServerConfig config;
  config.api_keys = {"secret"};
  config.max_body_bytes = 1 << 20;
  TestServer s({}, config);
  const std::string key = "Authorization: Bearer secret\r\n";
  const struct {
    std::string bytes;
    int status;
  } cases[] = {{head("/generate", 1000), 401},
               {head("/generate", 1000, "Expect: 100-continue\r\n"), 401},
               {head("/none", 1000, key), 404},
               {head("/health", 1000), 405},
               {head("/v1/models", 1000, key), 405},
               {head("/generate", 1 << 21, key), 413},
               {head("/generate", 1 << 21, key + "Expect: 100-continue\r\n"), 413},
               {head("/generate", 1000, key + "Expect: a miracle\r\n"), 417},
               {head("/generate", 1000, key + "Content-Encoding: gzip\r\n"), 415},
               {head("/generate", 1000, "Content-Encoding: gzip\r\n"), 401},
               {head("/generate", 1000, key + "Origin: https://evil.example\r\n"), 403}};
  for (const auto& c : cases) {
    HttpClient client(s.port);
    client.send(c.bytes);
    EXPECT_EQ(client.receive().status, c.status) << c.bytes;
    EXPECT_TRUE(client.at_end()) << "the connection must close, because the body can still arrive: "
                                 << c.bytes;
  }
}

TEST(Head, ThatIsRefusedKeepsTheConnectionIfItsBodyIsThere) {
  TestServer s;
  HttpClient client(s.port);
  client.send(post_request("/none", "{}") + get_request("/health"));
  EXPECT_EQ(client.receive().status, 404);
  EXPECT_EQ(client.receive().status, 200);
}

TEST(Head, NamesTheEncodingOfABodyThatIsRefused) {
  TestServer s;
  HttpClient client(s.port);
  client.send(head("/generate", 2, "Content-Encoding: br\r\n") + "{}");
  EXPECT_NE(client.receive().body.find("Content-Encoding: br is not supported"), std::string::npos);
  for (const char* none : {"Content-Encoding: Identity\r\n", "Content-Encoding:\r\n"})
    EXPECT_EQ(http_post(s.port, "/generate", "{}", none).body.find("Encoding"), std::string::npos) << none;
  EXPECT_EQ(http_get(s.port, "/health", "Content-Encoding: gzip\r\n").status, 200) << "no body";
}

TEST(Head, HasALimitOfLines) {
  TestServer s;
  std::string lines;
  for (int i = 0; i < 300; ++i) lines += "A:\r\n";
  EXPECT_EQ(http_get(s.port, "/health", lines).status, 431);
  EXPECT_EQ(http_get(s.port, "/health", lines.substr(0, 800)).status, 200);
}

// ---- memory ---------------------------------------------------------------------------------------

struct PlainServer {
  explicit PlainServer(ServerConfig config, HttpHandler handler = {}) {
    config.port = 0;
    if (!handler) handler = [](const std::shared_ptr<HttpExchange>& e) { e->respond({.body = "{}"}); };
    auto made = HttpServer::make(config, std::move(handler));
    EXPECT_TRUE(made.ok()) << made.status().to_string();
    server = std::move(made).value();
  }
  std::unique_ptr<HttpServer> server;
};

TEST(Memory, GrowsWithTheBytesThatCameAndNotWithThoseAnnounced) {
  PlainServer s({});
  std::vector<std::unique_ptr<HttpClient>> clients;
  const int64_t before = virtual_bytes();
  for (int i = 0; i < 64; ++i) {
    clients.push_back(std::make_unique<HttpClient>(s.server->port()));
    clients.back()->send(head("/", 32 << 20) + std::string(20000, 'x'));
  }
  ASSERT_TRUE(eventually([&] { return s.server->buffered_bytes() >= 64 * 10000; }));
  EXPECT_LT(s.server->buffered_bytes(), 64 * 100000);
  EXPECT_LT(virtual_bytes() - before, int64_t{512} << 20) << "64 x 32 MiB were reserved";
}

TEST(Memory, OfUnfinishedBodiesIsBounded) {
  ServerConfig config;
  config.max_body_bytes = 1 << 20;
  config.max_buffered_bytes = 4 << 20;
  PlainServer s(config);
  std::vector<std::unique_ptr<HttpClient>> clients;
  int64_t most = 0;
  for (int i = 0; i < 40; ++i) {
    clients.push_back(std::make_unique<HttpClient>(s.server->port()));
    clients.back()->send(head("/", 1 << 20) + std::string(900000, 'x'));
    most = std::max(most, s.server->buffered_bytes());
  }
  EXPECT_LE(most, (4 << 20) + (2 << 20));
  const HttpAnswer small = http_post(s.server->port(), "/", std::string(50000, 'x'));
  EXPECT_EQ(small.status, 200) << "the largest request must give way, not the newest";
  int refused = 0;
  for (const auto& client : clients) {
    client->send(std::string((1 << 20) - 900000, 'x'));
    const HttpAnswer answer = client->receive();
    EXPECT_TRUE(answer.status == 200 || answer.status == 503 || answer.status == 0) << answer.status;
    if (answer.status != 503) continue;
    ++refused;
    EXPECT_EQ(answer.headers.at("retry-after"), "1");
    EXPECT_NE(answer.body.find("max_buffered_bytes=4194304"), std::string::npos) << answer.body;
  }
  EXPECT_GE(refused, 30);
  clients.clear();
  EXPECT_TRUE(eventually([&] { return s.server->buffered_bytes() == 0; }));
}

TEST(Memory, OfABodyIsFreedWhenItIsHandled) {
  std::shared_ptr<HttpExchange> kept;
  PlainServer s({}, [&](const std::shared_ptr<HttpExchange>& e) { kept = e; });
  HttpClient client(s.server->port());
  client.send(post_request("/", std::string(1 << 20, 'x')));
  ASSERT_TRUE(eventually([&] { return s.server->busy_exchanges() == 1 && s.server->buffered_bytes() == 0; }));
  kept->post([&] { kept->respond({.body = "{}"}); });
  EXPECT_EQ(client.receive().status, 200);
  s.server->close_all();
  kept.reset();  // an exchange must not outlive its server
}

struct Holder final : RequestMemory::Holder {
  void give_way() override { ++told; }
  int told = 0;
};

TEST(RequestMemory, TheLargestThatArrivesGivesWay) {
  RequestMemory memory(100);
  Holder large, middle, small, parsed, huge;
  EXPECT_TRUE(memory.set(large, 60, true));
  EXPECT_TRUE(memory.set(middle, 30, true));
  EXPECT_TRUE(memory.set(small, 20, true));
  EXPECT_EQ(std::make_tuple(large.told, middle.told, small.told), std::make_tuple(1, 0, 0));
  EXPECT_FALSE(memory.set(large, 70, true)) << "it was asked to give way";
  EXPECT_EQ(memory.total(), 110) << "it has not given way yet";
  EXPECT_TRUE(memory.set(large, 0, true));
  EXPECT_EQ(memory.total(), 50);
  EXPECT_FALSE(memory.set(huge, 51, true)) << "it would be the largest request";
  EXPECT_EQ(memory.total(), 50);
  EXPECT_TRUE(memory.set(parsed, 95, false)) << "complete requests take precedence over arriving ones";
  EXPECT_EQ(std::make_tuple(large.told, middle.told, small.told), std::make_tuple(1, 1, 1));
  Holder next;
  EXPECT_FALSE(memory.set(next, 6, false)) << "no request can give way any more";
  for (Holder* holder : {&middle, &small, &parsed}) memory.set(*holder, 0, false);
  EXPECT_EQ(memory.total(), 0);
  EXPECT_TRUE(memory.set(next, 100, true));
  EXPECT_TRUE(memory.set(next, 0, true));
}

TEST(Memory, BudgetIsAtLeastABody) {
  ServerConfig config;
  config.port = 0;
  config.max_body_bytes = 1 << 20;
  config.max_buffered_bytes = (1 << 20) - 1;
  EXPECT_EQ(Server::make(config).status().code(), StatusCode::kInvalidArgument);
}

// 8 bodies of 10 MiB at 64 MiB/s, minus a burst of 8 MiB and the first bytes, which count as small bodies.
TEST(Memory, LargeBodiesOfAllConnectionsShareOneRate) {
  ServerConfig config;
  config.max_buffered_bytes = 400 << 20;  // all bodies fit in a quarter of it while they wait for a worker
  PlainServer s(config);
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::jthread> clients;
  for (int i = 0; i < 8; ++i)
    clients.emplace_back(
        [&] { EXPECT_EQ(http_post(s.server->port(), "/", std::string(10 << 20, 'x')).status, 200); });
  clients.clear();
  EXPECT_GT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(1050));
}

// ---- threads --------------------------------------------------------------------------------------

TEST(Workers, ProbesAndSmallRequestsAreAnsweredWhileLargeOnesRun) {
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  std::atomic<int> blocked{0};
  ServerConfig config;
  config.http_threads = 3;
  PlainServer s(config, [&](const std::shared_ptr<HttpExchange>& e) {
    if (e->request().body.size() > 100000) {
      ++blocked;
      released.wait();
    }
    e->respond({.body = "{}"});
  });
  std::vector<std::unique_ptr<HttpClient>> clients;
  for (int i = 0; i < 8; ++i) {
    clients.push_back(std::make_unique<HttpClient>(s.server->port()));
    clients.back()->send(post_request("/", std::string(200000, 'x')));
  }
  ASSERT_TRUE(eventually([&] { return blocked == 2 && s.server->busy_exchanges() == 8; }));
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(http_get(s.server->port(), "/health").status, 200);
    EXPECT_EQ(http_post(s.server->port(), "/", "{}").status, 200);
  }
  EXPECT_EQ(blocked, 2);
  clients.pop_back();  // disconnected before a worker took its request
  release.set_value();
  for (const auto& client : clients) EXPECT_EQ(client->receive().status, 200);
  EXPECT_TRUE(eventually([&] { return s.server->busy_exchanges() == 0; }));
  EXPECT_EQ(blocked, 7);
}

TEST(Workers, AQueueOfLargeRequestsKeepsNoSmallOneOut) {
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  std::atomic<int> blocked{0};
  ServerConfig config;
  config.http_threads = 2;
  config.max_body_bytes = 1 << 20;
  config.max_buffered_bytes = 8 << 20;
  PlainServer s(config, [&](const std::shared_ptr<HttpExchange>& e) {
    if (e->request().body.size() > 100000) {
      ++blocked;
      released.wait();
    }
    e->respond({.body = "{}"});
  });
  const std::string large = post_request("/", std::string(1 << 20, 'x'));
  std::vector<std::unique_ptr<HttpClient>> clients;
  for (int i = 1; i <= 4; ++i) {  // one runs; three wait, and together exceed a quarter of the budget
    clients.push_back(std::make_unique<HttpClient>(s.server->port()));
    clients.back()->send(large);
    ASSERT_TRUE(eventually([&] { return blocked == 1 && s.server->busy_exchanges() == i; }));
  }
  for (int i = 0; i < 20; ++i) {
    HttpClient client(s.server->port());
    client.send(large);
    const HttpAnswer answer = client.receive();
    EXPECT_EQ(answer.status, 503);
    EXPECT_EQ(answer.headers.at("retry-after"), "1");
    EXPECT_EQ(http_post(s.server->port(), "/", std::string(60000, 'x')).status, 200);
  }
  EXPECT_LE(s.server->buffered_bytes(), 5 << 20);
  release.set_value();
  for (const auto& client : clients) EXPECT_EQ(client->receive().status, 200);
}

TEST(Workers, StopWhileHandlersRun) {
  std::atomic<bool> runs{false};
  auto s = std::make_unique<PlainServer>(ServerConfig{}, [&](const std::shared_ptr<HttpExchange>& e) {
    runs = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    e->respond({.body = "{}"});
  });
  std::vector<std::unique_ptr<HttpClient>> clients;
  for (int i = 0; i < 20; ++i) {
    clients.push_back(std::make_unique<HttpClient>(s->server->port()));
    clients.back()->send(post_request("/", "{}"));
  }
  ASSERT_TRUE(eventually([&] { return runs.load(); }));
  s.reset();
  for (const auto& client : clients) {
    const int status = client->receive().status;
    EXPECT_TRUE(status == 200 || status == 0) << status;
  }
}

TEST(WorkerPool, RunsTheOldestAndKeepsOneThreadForSmallTasks) {
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  std::mutex mutex;
  std::string order;
  WorkerPool pool(2);
  const auto task = [&](char name, bool waits) {
    return [&, name, waits] {
      if (waits) released.wait();
      std::lock_guard<std::mutex> lock(mutex);
      order += name;
    };
  };
  const auto so_far = [&] {
    std::lock_guard<std::mutex> lock(mutex);
    return order;
  };
  EXPECT_TRUE(pool.add(task('A', true), false));
  EXPECT_TRUE(pool.add(task('B', false), false));
  EXPECT_TRUE(pool.add(task('c', false), true));
  ASSERT_TRUE(eventually([&] { return so_far() == "c"; }));
  release.set_value();
  pool.stop();
  EXPECT_EQ(order, "cAB") << "stop() must run the queued tasks";
  EXPECT_FALSE(pool.add(task('D', false), true));
}

// ---- parsing --------------------------------------------------------------------------------------

TEST(Json, ThatGrowsWhenItIsParsedIsRefusedBefore) {
  const std::pair<const char*, std::string> units[] = {
      {"numbers", "0,"}, {"arrays", "[],"}, {"objects", "{},"}, {"strings", "\"\","}, {"keys", "{\"a\":0},"}};
  for (const auto& [name, unit] : units) {
    std::string text = "[";
    while (text.size() < size_t{9} << 20) text += unit;
    text.back() = ']';
    const double start = cpu_seconds();
    const Result<fp4moe::json> parsed = parse_json(text);
    EXPECT_FALSE(parsed.ok()) << name;
    EXPECT_NE(parsed.status().message().find("134217728"), std::string::npos) << parsed.status().message();
    EXPECT_LT(cpu_seconds() - start, 2) << name;
  }
}

// Key lookup is linear: 600 objects of 4000 keys would take 5e9 comparisons.
TEST(Json, OfManyObjectsWithManyKeysIsRefused) {
  std::string object = "{";
  for (int i = 0; i < 4000; ++i) object += "\"" + std::to_string(i) + "\":0,";
  object.back() = '}';
  EXPECT_TRUE(parse_json("[" + object + "," + object + "]").ok());
  std::string many = "[";
  for (int i = 0; i < 600; ++i) many += object + ",";
  many.back() = ']';
  EXPECT_NE(parse_json(many).status().message().find("many keys"), std::string::npos);
}

TEST(Json, TakesAtMostTheEstimatedMemory) {
  EXPECT_GE(*parsed_json_bytes("[1,2,3]"), 3 * static_cast<int64_t>(sizeof(fp4moe::json)));
  EXPECT_GE(*parsed_json_bytes(R"({"a":"b"})"), 2 * static_cast<int64_t>(sizeof(std::string)));
  EXPECT_EQ(*parsed_json_bytes(R"(["[{,:"])"), *parsed_json_bytes(R"(["abcd"])"))
      << "strings must not count as structure";
}

TEST(Fields, UnknownOnesAreFoundInLinearTime) {
  fp4moe::json object = fp4moe::json::object();
  std::string text = "{";
  for (int i = 0; i < 4000; ++i) text += "\"field" + std::to_string(i) + "\":0,";
  text.back() = '}';
  object = *parse_json(text);
  Fields fields(object);
  for (int i = 0; i < 4000; i += 2) fields.find("field" + std::to_string(i));
  const double start = cpu_seconds();
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(fields.unknown().size(), 2000u);
  }
  EXPECT_LT(cpu_seconds() - start, 1);
}

TEST(Samples, OfOnePromptShareIt) {
  FakeEngine engine;
  json body = {{"input_ids", std::vector<int>(1000, 7)}, {"sampling_params", {{"n", 128}}}};
  const fp4moe::json parsed = *parse_json(body.dump());
  Fields fields(parsed);
  const GenerationCall call = parse_generate(engine, fields);
  ASSERT_TRUE(fields.ok()) << fields.error().to_string();
  ASSERT_EQ(call.requests.size(), 128u);
  for (size_t i = 0; i < 128; ++i) {
    EXPECT_EQ(call.prompts[i], call.prompts[0]);
    EXPECT_TRUE(call.requests[i].input_ids.empty());
  }
}

TEST(Samples, OfAPromptThatCannotFitAreNeverMade) {
  FakeEngine engine;
  const struct {
    GenerationCall (*parse)(const Engine&, Fields&);
    const char* field;
  } apis[] = {{parse_generate, "input_ids"}, {parse_completion, "prompt"}};
  for (const auto& api : apis) {
    for (const int64_t length : {4096, 100000}) {
      json body = {{api.field, std::vector<int>(static_cast<size_t>(length), 7)}, {"n", 128}};
      if (api.parse == parse_generate) body["sampling_params"] = {{"n", 128}};
      const fp4moe::json parsed = *parse_json(body.dump());
      Fields fields(parsed);
      const GenerationCall call = api.parse(engine, fields);
      EXPECT_EQ(fields.error().code(), StatusCode::kDoesNotFit);
      EXPECT_NE(fields.error().message().find(
                    "maximum context length is 4096 tokens (prompt and output together), but the "
                    "prompt has " +
                    std::to_string(length)),
                std::string::npos)
          << fields.error().message();
      EXPECT_TRUE(call.requests.empty());
    }
  }
}

TEST(Samples, HaveALimitOfTokensInAll) {
  FakeOptions options;
  options.context_length = 1 << 20;
  const FakeEngine engine(options);
  for (const int64_t n : {16, 17}) {
    const json body = {{"input_ids", std::vector<int>((1 << 20) - 1, 7)}, {"sampling_params", {{"n", n}}}};
    const fp4moe::json parsed = *parse_json(body.dump());
    Fields fields(parsed);
    parse_generate(engine, fields);
    EXPECT_EQ(fields.ok(), n == 16) << fields.error().to_string();
  }
}

TEST(Texts, ThatCannotFitAreNotTokenized) {
  FakeOptions options;
  options.max_bytes_per_token = 8;
  TestServer s(options);
  for (const auto& [path, body] :
       {std::pair{"/generate", json{{"text", std::string(40000, 'a')}}},
        {"/v1/completions", json{{"prompt", std::string(40000, 'a')}}},
        {"/v1/chat/completions",
         json{{"messages", {{{"role", "user"}, {"content", std::string(40000, 'a')}}}}}}}) {
    const HttpAnswer answer = http_post(s.port, path, body.dump());
    EXPECT_EQ(answer.status, 400) << path;
    const json error = json::parse(answer.body)["error"];
    EXPECT_EQ(error["code"], "context_length_exceeded") << answer.body;
    const std::string message = error["message"];
    for (const char* part : {"40000 bytes", "at least 5000 tokens", "4096"})
      EXPECT_NE(message.find(part), std::string::npos) << message;
  }
}

TEST(Texts, ThatCannotFitAsMessagesAreRefused) {
  TestServer s;
  json messages = json::array();
  for (int i = 0; i < 5000; ++i) messages.push_back({{"role", "user"}, {"content", ""}});
  const HttpAnswer answer = http_post(s.port, "/v1/chat/completions", json{{"messages", messages}}.dump());
  EXPECT_EQ(answer.status, 400);
  EXPECT_NE(answer.body.find("5000 messages"), std::string::npos) << answer.body;
}

// CPU seconds for a chat whose message repeats `text` up to num_bytes bytes.
double chat_seconds(const Engine& engine, const std::string& text, size_t num_bytes) {
  std::string content;
  while (content.size() < num_bytes) content += text;
  const fp4moe::json body = {{"messages", {{{"role", "user"}, {"content", content}}}}};
  double best = 1e9;
  for (int repeat = 0; repeat < 2; ++repeat) {
    Fields fields(body);
    const double start = cpu_seconds();
    const ChatMessages messages = read_messages(engine, fields, {});
    EXPECT_TRUE(fields.ok());
    const Result<std::string> prompt = engine.apply_chat_template(messages.text, {});
    const std::vector<int32_t> ids = encode_rendered(engine, fields, *prompt, messages.mark);
    best = std::min(best, cpu_seconds() - start);
    EXPECT_EQ(ids.size(), content.size());
    EXPECT_EQ(std::count_if(ids.begin(), ids.end(), [](int32_t id) { return id > 255; }), 0);
  }
  return best;
}

TEST(Chats, OfSpecialTokensTakeLinearTime) {
  FakeOptions options;
  options.special_tokens = {"<|a|>", "<|b|>", "a|><|", "|><"};
  options.context_length = 1 << 30;
  const FakeEngine engine(options);
  for (const char* text : {"<|a|>", "<|", "<|a|><|a|><|b|>|>"}) {
    const double once = chat_seconds(engine, text, 100000), four_times = chat_seconds(engine, text, 400000);
    EXPECT_LT(four_times, 6 * once + 0.05) << text << ": " << once << " s, " << four_times << " s";
  }
}

}  // namespace
}  // namespace fp4moe
